"""CSV -> a folder of shards."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np

from mpitrain.data.sources import Values, read_bytes, refuse_existing, write_classification
from mpitrain.data.writing import write_shards
from mpitrain.errors import ConfigError, DataError, UsageError


def import_csv(source: Path | str, out: Path | str, *, label: str | int = -1, kind: str | None = None,
               overwrite: bool = False) -> Path:
    """A table of numbers, with a header line or without; `label` is the target's column, by name or index (default: last).

    `kind` is "classification" or "regression"; unless given, targets that are all whole numbers written without a point,
    or words, are classes (words are numbered in sorted order, integers are taken as they are). Inputs become float32.
    """
    source, out = Path(source), Path(out)
    refuse_existing(out, overwrite)
    try:
        text = read_bytes(source).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.object[error.start]:#04x} is not UTF-8", file=source, offset=error.start) from None
    lines = [line for line in csv.reader(text.splitlines()) if line]
    if not lines:
        raise DataError("the table is empty", file=source)
    column = _label_column(lines[0], label, source)
    header = any(not _is_number(cell) for i, cell in enumerate(lines[0]) if i != column)
    names = lines[0] if header else [str(i) for i in range(len(lines[0]))]
    body = lines[1:] if header or isinstance(label, str) and label in lines[0] else lines
    x = np.empty((len(body), len(names) - 1), np.float32)
    for row, cells in enumerate(body):
        if len(cells) != len(names):
            raise DataError(f"{len(cells)} columns, but the first line has {len(names)}", file=source, row=row)
        for place, cell in enumerate(cells[:column] + cells[column + 1:]):
            if not _is_number(cell):
                name = (names[:column] + names[column + 1:])[place]
                raise DataError(f'"{cell}" in column "{name}" is not a finite number', file=source, row=row)
            x[row, place] = float(cell)
    return _write_table(out, x, [cells[column].strip() for cells in body], kind, source, overwrite)


def _label_column(first: list[str], label: str | int, source: Path) -> int:
    if isinstance(label, str) and label in first:
        return first.index(label)
    try:
        column = int(label)
    except ValueError:
        raise ConfigError(f'no column "{label}" (there: {", ".join(first[:20])})', file=source) from None
    if not -len(first) <= column < len(first):
        raise ConfigError(f"no column {column}: the first line has {len(first)}", file=source)
    return column % len(first)


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _is_integer(cell: str) -> bool:
    return cell.removeprefix("-").removeprefix("+").isdecimal()


def _write_table(out: Path, x: Values, targets: list[str], kind: str | None, source: Path, overwrite: bool) -> Path:
    numbers = all(map(_is_number, targets))
    whole = all(map(_is_integer, targets))
    kind = kind or ("classification" if whole or not numbers else "regression")
    if kind == "regression":
        if not numbers:
            row = next(i for i, cell in enumerate(targets) if not _is_number(cell))
            raise DataError(f'the target "{targets[row]}" is not a finite number', file=source, row=row)
        return write_shards(out, x, np.array(targets, np.float32), kind="regression", overwrite=overwrite)
    if kind != "classification":
        raise UsageError(f'kind "{kind}" is not one of classification, regression')
    if whole:
        return write_classification(out, x, np.array(targets, np.int64), source, overwrite)
    classes = sorted(set(targets))
    number = {name: i for i, name in enumerate(classes)}
    return write_classification(out, x, np.array([number[t] for t in targets]), source, overwrite, classes)
