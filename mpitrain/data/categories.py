"""Columns of a table that hold categories: words, or whole numbers from 0 up, as integer codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpitrain.data.shards import Values
from mpitrain.errors import ConfigError, DataError, nearest

MOST_FLOAT, MOST_WHOLE = 1 << 24, (1 << 63) - 2
NUMBERS, CODES = "numbers", "codes"       # inputs by name: columns of numbers, and those of categories
Known = dict[str, list[str] | int]        # column -> the words of codes 0, 1, ..., or how many codes there are


class Asked(NamedTuple):
    """Columns by name: of words, and of whole numbers that are codes already."""

    words: Sequence[str] = ()
    integers: Sequence[str] = ()


def coded(lines: Sequence[Sequence[str]], names: Sequence[str], asked: Asked, target: int, source: Path, *,
          whole: bool) -> tuple[Values, Known]:
    """The codes (rows, columns) of these columns of a table, words first, and what they stand for. Words are numbered in sorted
    order. ConfigError for a column that is not there, or the target's; DataError at a cell that is no code, or one that the
    column does not hold: they stay `whole` numbers, or become float32."""
    most, kind = (MOST_WHOLE, "int64") if whole else (MOST_FLOAT, "float32")
    codes, known = [], dict[str, Any]()
    for name in (*asked.words, *asked.integers):
        column = _column(name, names, target, source)
        if name in known:
            raise ConfigError(f'the column "{name}" is named twice among categories and integers', file=source)
        cells = [line[column].strip() for line in lines]
        if name in asked.words:
            known[name] = sorted(set(cells))
            number = {word: code for code, word in enumerate(known[name])}
            codes.append([number[cell] for cell in cells])
        else:
            wrong = next((row for row, cell in enumerate(cells) if not (cell.isascii() and cell.isdecimal())), None)
            if wrong is not None:
                raise DataError(f'"{cells[wrong]}" in column "{name}" is no whole number from 0 up; name the column among '
                                "--categories, if its cells are words", file=source, row=wrong)
            codes.append([int(cell) for cell in cells])
            if (largest := max(codes[-1], default=-1)) > most:
                advice = "" if whole else ", or keep them apart as whole numbers, --by-name"
                raise DataError(f'the code {largest} in column "{name}" is larger than {most}, up to which {kind} holds each '
                                f"whole number; count from 0 without gaps{advice}", file=source, row=codes[-1].index(largest))
            known[name] = largest + 1
    return np.array(codes, np.int64).T.reshape(len(lines), len(codes)), known


def _column(name: str, names: Sequence[str], target: int, source: Path) -> int:
    if name not in names:
        raise ConfigError(f'no column "{name}"{nearest(name, names)}', file=source)
    if names.index(name) == target:
        raise ConfigError(f'the column "{name}" is the target; --label names another', file=source)
    return names.index(name)


def counts(known: Known) -> list[int]:
    """How many codes each column has."""
    return [one if isinstance(one, int) else len(one) for one in known.values()]
