"""The progress of a study as lines, from the records of its journal as rank 0 hears of them.

Open MPI passes on what ranks write in whole lines, so nothing is drawn over: each line says where the study is, and one comes
every `every_s` seconds at most (every WATCHED_S where somebody looks at a terminal; 0: with each outcome), and one at the end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from mpitrain.search.front import Objective
from mpitrain.search.report import shown
from mpitrain.search.table import FAILED, RUNNING, Record, Table
from mpitrain.train.observers.log import WATCHED_S, duration


class StudyProgress:
    """Called with each record and the table after it; `tell` shows a line, `clock` gives seconds as the records' times do."""

    def __init__(self, every_s: float, *, watched: bool, tell: Callable[[str], object], clock: Callable[[], float] = time.time):
        self.every_s = min(every_s, WATCHED_S) if watched else every_s
        self._tell, self._clock = tell, clock
        self._began = self._told = clock()
        self._done = 0                                       # outcomes of earlier jobs, which a study that goes on begins with
        self._table: Table | None = None                     # with outcomes that no line has told yet

    def __call__(self, record: Record, table: Table) -> None:
        if record.get("time", self._began) < self._began:
            self._done = len(table.told)
        elif record["kind"] in ("result", "fail"):
            self._table = table
            if self._clock() - self._told >= self.every_s:
                self.finish()

    def finish(self) -> None:
        """A line about what is not told yet, if anything."""
        table, self._table = self._table, None
        if table is not None:
            self._told = self._clock()
            self._tell(progress_line(table, self._told - self._began, len(table.told) - self._done))


def progress_line(table: Table, seconds: float, lately: int) -> str:
    """``study 12/64 trials, 4 running; epochs 1: 10, 3: 2; best accuracy 0.9712 (trial 7, epoch 3)  0:00:12``, and the time left
    if trials go on as the `lately` outcomes of these seconds did."""
    states = Counter(trial.state for trial in table.trials)
    words = f"study {len(table.told)}/{table.planned} trials"
    words += "".join(f", {states[state]} {state}" for state in (RUNNING, FAILED) if states[state])
    reached = [(epochs, sum(number in trial.results for trial in table.trials)) for number, epochs in enumerate(table.epochs)]
    words += f"; {table.unit} " + ", ".join(f"{epochs}: {trials}" for epochs, trials in reached if trials) if any(
        trials for _, trials in reached) else ""
    best = table.best()
    if best is not None:
        first: Objective = table.objectives[0]
        words += f"; best {first.name} {shown(best.results[best.reached].get(first.name))} (trial {best.id}, " \
                 f"{table.unit[:-1]} {table.epochs[best.reached]})"
    words += f"  {duration(seconds)}"
    left = table.planned - len(table.told)
    return words + (f"  ETA about {duration(seconds / lately * left)}" if lately > 0 and left else "")
