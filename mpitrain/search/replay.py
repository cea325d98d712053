"""A study in virtual time: acted workers run jobs whose results and durations are known, so that searches can be compared.

Nothing trains here. `replay` asks the same `Decisions` as a real study does, in the order in which acted workers get free.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.search.decisions import Decisions
from mpitrain.search.pruners import Done, Promote, Start
from mpitrain.search.samplers import Asked
from mpitrain.search.table import Record, Table, Trial, failure, result


class Ended(NamedTuple):
    """A job that has ended at a virtual time."""

    time: float
    trial: Trial
    rung: int


@dataclass(frozen=True)
class Curve:
    """A recorded trial: its values, its accuracy after each epoch, and the seconds of one of its epochs."""

    values: Mapping[str, Any]
    accuracies: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Recorded:
    """A sampler that gives recorded trials in an order; a trial's values are the number of its curve."""

    order: Sequence[int]

    def ask(self, table: Table, number: int) -> Asked:
        return Asked({"curve": int(self.order[number])})


def read_curves(path: Path) -> list[Curve]:
    """The curves of a file that benchmarks/search_replay.py has recorded: the first line says of how many rows correct ones are
    counted."""
    first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [Curve(line["values"], tuple(n / first["rows"] for n in line["correct"]), line["ms"] / 1000) for line in lines]


def replay(decisions: Decisions, workers: int, job: Callable[[Trial, int, int], tuple[Mapping[str, Any] | str, float]],
           until: Callable[[Ended], bool] = lambda ended: False) -> tuple[list[Ended], list[Record]]:
    """Runs a study on so many acted workers; the ends of all jobs in their order, and all records.

    `job(trial, reached, rung)` gives the results of training a trial from the rung that it has reached (-1: none) to another, or
    the code of an error, and how long that takes. It ends early where `until(ended)` is true.
    """
    running: list[tuple[float, int, Start | Promote, Mapping[str, Any] | str]] = []
    ended, records, now, started = list[Ended](), list[Record](), 0.0, 0
    while True:
        while len(running) < workers:
            action, new = decisions.next()
            records += new
            if not isinstance(action, Start | Promote):
                break
            found, duration = job(action.trial, action.trial.reached, action.rung)
            heapq.heappush(running, (now + duration, started, action, found))
            started += 1
        if not running:
            assert isinstance(action, Done), "nothing runs, and the study waits"
            return ended, records
        now, _, action, found = heapq.heappop(running)
        trial, rung = action.trial, action.rung
        record = failure(trial.id, rung, found, "") if isinstance(found, str) else result(trial.id, rung, found)
        records.append(record)
        decisions.apply(record)
        ended.append(Ended(now, trial, rung))
        if until(ended[-1]):
            return ended, records


def job_of(curves: Sequence[Curve], epochs: Sequence[int]) -> Callable[[Trial, int, int], tuple[Mapping[str, Any], float]]:
    """The jobs of recorded curves with rungs at these epochs."""
    def job(trial: Trial, reached: int, rung: int) -> tuple[Mapping[str, Any], float]:
        curve = curves[trial.values["curve"]]
        trained = epochs[rung] - (epochs[reached] if reached >= 0 else 0)
        return {"accuracy": curve.accuracies[epochs[rung] - 1]}, trained * curve.seconds
    return job
