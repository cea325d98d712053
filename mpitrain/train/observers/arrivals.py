"""arrivals.jsonl: in which order the results of workers were applied, a line each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.train.intervals import Step
from mpitrain.train.observers.log import Metrics
from mpitrain.train.observers.observer import Observer, Watched

NAME = "arrivals.jsonl"


class ArrivalsFile(Observer):
    """Writes on rank 0 what `found()` has after each round. A run that goes on drops the rounds that it does again."""

    def __init__(self, found: Callable[[], Sequence[Mapping[str, Any]]]):
        self.found, self._file = found, Metrics(None)

    def begin(self, run: Watched) -> None:
        if run.rank == 0 and run.folder is not None:
            path = run.folder / NAME
            if path.exists():
                keep_until(path, run.step)
            self._file = Metrics(path)

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        for line in self.found():
            self._file.write(line)

    def before_checkpoint(self, step: int) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def keep_until(path: Path, round: int) -> None:
    """Leaves the lines of rounds up to this one."""
    lines = [line for line in path.read_text().splitlines() if is_until(line, round)]
    beside = path.with_suffix(".new")
    beside.write_text("".join(f"{line}\n" for line in lines))
    os.replace(beside, path)


def is_until(line: str, round: int) -> bool:
    try:
        return bool(json.loads(line)["round"] <= round)
    except (ValueError, KeyError, TypeError):                 # The last one may have been cut short.
        return False
