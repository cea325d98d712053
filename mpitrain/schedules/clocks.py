"""A table of clocks: the seconds and joules of each stage's actions at each clock, in the file that Zeus's profiler writes.

    stage,instruction,frequency,time,energy          MHz, seconds and joules of one micro-batch; instructions "forward",
    0,forward,1410,0.0412,11.9                       "backward", and "weight" where a schedule has weight gradients apart

Stages are virtual ones, where a stage has several chunks.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from mpitrain.errors import ConfigError, DataError, MissingError, nearest

COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
KIND = {"forward": "F", "backward": "B", "weight": "W"}
WORD = {kind: word for word, kind in KIND.items()}


class Clock(NamedTuple):
    """A clock in MHz, and the seconds and joules of an action at it."""

    frequency: float
    seconds: float
    joules: float


Table: TypeAlias = dict[tuple[int, str], list[Clock]]         # (virtual stage, "F", "B" or "W") -> clocks, the fastest first


def read_table(path: Path) -> Table:
    """The table in a file. DataError for one that cannot be understood, with its line."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows, columns = list(reader), reader.fieldnames or ()
    except FileNotFoundError:
        raise MissingError("no such table of clocks; Zeus's profiler writes one: stage,instruction,frequency,time,energy",
                           file=path) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"not a table of clocks in CSV: {error}", file=path) from None
    missing = [name for name in COLUMNS if name not in columns] or ["row"] * (not rows)
    if missing:
        raise DataError(f"a table of clocks has the columns {','.join(COLUMNS)} and rows, found no {missing[0]}", file=path)
    table: Table = {}
    for number, row in enumerate(rows, start=2):
        table.setdefault(*clock_in(row, path, number, table))
    for clocks in table.values():
        clocks.sort(key=lambda clock: (clock.seconds, clock.joules))
    stages = {stage for stage, _ in table}
    if stages != set(range(len(stages))):
        without = next(stage for stage in range(len(stages)) if stage not in stages)
        raise DataError(f"stages are counted from 0, and there is stage {max(stages)} and no stage {without}", file=path)
    return table


def clock_in(row: Mapping[str, str | None], path: Path, line: int, table: Table) -> tuple[tuple[int, str], list[Clock]]:
    """Adds the clock of a row to those of its stage and instruction, and gives these."""
    short = next((name for name in COLUMNS if row[name] is None), "")
    if short:
        raise DataError(f"line {line}: expected a value for each of {','.join(COLUMNS)}, and the row ends before {short}",
                        file=path)
    word = (row["instruction"] or "").strip().lower()
    if word not in KIND:
        raise DataError(f'line {line}: the instruction "{word}" is not there{nearest(word, KIND)}', file=path)
    numbers = []
    for name in ("stage", "frequency", "time", "energy"):
        try:
            numbers.append(float(row[name] or ""))
        except ValueError:
            numbers.append(math.nan)
        if not 0 <= numbers[-1] < math.inf or (name == "stage" and numbers[-1] % 1) or (name in ("frequency", "time")
                                                                                       and not numbers[-1]):
            what = "a whole number from 0 on" if name == "stage" else "more than 0" if name != "energy" else "0 or more"
            raise DataError(f'line {line}: {name} must be {what}, found "{row[name]}"', file=path)
    stage, frequency, seconds, joules = numbers
    clocks = table.get((int(stage), KIND[word]), [])
    if any(clock.frequency == frequency for clock in clocks):
        raise DataError(f"line {line}: {frequency:g} MHz of {word} on stage {int(stage)} are there twice", file=path)
    clocks.append(Clock(frequency, seconds, joules))
    return (int(stage), KIND[word]), clocks


def write_table(path: Path, table: Table) -> None:
    """The table in a file that `read_table` and Zeus read."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for (stage, kind), clocks in sorted(table.items()):
            writer.writerows((stage, WORD[kind], f"{clock.frequency:g}", repr(clock.seconds), repr(clock.joules))
                             for clock in clocks)


def refuse_incomplete(table: Table, n_stages: int, kinds: str) -> None:
    missing = next(((stage, kind) for stage in range(n_stages) for kind in kinds if not table.get((stage, kind))), None)
    if missing is not None:
        words = ", ".join(WORD[kind] for kind in kinds)
        raise ConfigError(f"the table of clocks has no {WORD[missing[1]]} of stage {missing[0]}, and the pipeline has {n_stages} "
                          f"stages of {words}; profile that, too, or take another mesh.schedule")


def stages_in(table: Table) -> int:
    return 1 + max(stage for stage, _ in table)
