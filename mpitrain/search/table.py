"""The trials of a study and what they have measured: plain data, rebuilt by applying the records of a journal one by one.

    kind       keys besides                           the trial afterwards
    start      trial, rung, values [, attributes]     running towards its first rung (with pruner "none" that is the last one)
    promote    trial, rung                            running towards that rung
    result     trial, rung, values                    paused there, or finished at the last rung
    fail       trial, rung, code, message             failed
    stop       trial, rung                            stopped after that rung: it does not go on
    lost       trial, rung                            open: the job that ran it has ended
    again      trial, rung                            running once more, from its last pause
    exchange   trial, values [, from]                 going on with other values (populations); one that has failed goes on, too,
                                                      with the weights of another, as if it had paused
    job        event [, groups, ranks, ...]           (a job begins to work on the study, or is asked to stop)

A rung is counted from 0; `rungs` gives its epochs. Further keys (seconds, group) stay in the journal and are not needed here.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitrain.errors import CheckpointError, NumericsError
from mpitrain.search import front
from mpitrain.search.front import Objective, Score
from mpitrain.search.space import Values

Record = dict[str, Any]
RUNNING, PAUSED, FINISHED, STOPPED, FAILED, LOST = "running", "paused", "finished", "stopped", "failed", "lost"


@dataclass
class Trial:
    """One configuration of a study. `rung` is the one that it runs towards, or has reached."""

    id: int
    values: Values
    rung: int
    state: str = RUNNING
    results: dict[int, dict[str, Any]] = field(default_factory=dict)     # by rung: what was measured there
    score: Score | None = None               # at the highest rung that it has reached; None: none yet, or not finite
    code: str = ""                           # of the error that ended it
    message: str = ""                        # and what that said
    attributes: Mapping[str, Any] = field(default_factory=dict)          # what its sampler wants to know again

    @property
    def reached(self) -> int:
        """The highest rung with a result; -1 where there is none."""
        return max(self.results, default=-1)


class Rung:
    """The trials that reached a rung, or failed on their way to it, in the order of their scores."""

    def __init__(self, objectives: int) -> None:
        self.ids: list[int] = []                  # in the order in which they came
        self.scores: dict[int, Score] = {}        # of those that have one
        self.promoted: set[int] = set()           # that have gone on to the next
        self._sorted: list[tuple[float, int]] = []                # (minus the score, id) with one objective
        self._ranking = front.Ranking(objectives) if objectives > 1 else None
        self._ranked: tuple[int, int, list[int]] = (0, 0, [])     # of so many scores the best n, as ids

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, trial: int, score: Score | None) -> None:
        self.ids.append(trial)
        if score is not None:
            self.scores[trial] = score
            if self._ranking is None:
                bisect.insort(self._sorted, (-score[0], trial))
            else:
                self._ranking.add(score)

    def best(self, n: int) -> list[int]:
        """The ids of the best `n`: with one objective the best first, and of equal ones the trial that started first; with
        several as `front.Ranking.best` has them. Trials without a score are none."""
        if n <= 0:
            return []
        if self._ranking is None:
            return [trial for _, trial in self._sorted[:n]]
        if self._ranked[:2] != (len(self.scores), n):
            came = list(self.scores)
            self._ranked = len(self.scores), n, [came[i] for i in self._ranking.best(n)]
        return self._ranked[2]


class Table:
    """All trials of a study of `planned` trials with rungs at so many epochs, or rounds where that is the unit."""

    def __init__(self, rungs: Sequence[int], objectives: Sequence[Objective], planned: int, unit: str = "epochs"):
        self.epochs, self.objectives, self.planned, self.unit = tuple(rungs), tuple(objectives), planned, unit
        self.trials: list[Trial] = []                         # by id
        self.rungs = [Rung(len(objectives)) for _ in rungs]
        self.open: dict[tuple[int, int], str] = {}            # (trial, rung) -> running or lost, in the order of their starts
        self.paused: dict[int, None] = {}                     # ids in the order of their pauses
        self.told: list[int] = []                             # ids in the order of their first results, failures among them
        self.asked: set[str] = set()                          # the points that have been tried
        self.records = 0                                      # that have been applied

    @property
    def last(self) -> int:
        """The highest rung."""
        return len(self.rungs) - 1

    @property
    def left(self) -> int:
        """Trials that have not started."""
        return self.planned - len(self.trials)

    def lost(self) -> tuple[int, int] | None:
        """(trial, rung) of the first job that has to run again."""
        return next((job for job, state in self.open.items() if state == LOST), None)

    def best(self) -> Trial | None:
        """The best trial of the highest rung that any has reached: of its front, the best by the first objective."""
        for rung in reversed(self.rungs):
            if rung.scores:                       # the best by the first, and of those by the others, is dominated by nobody
                return self.trials[max(rung.scores, key=lambda trial: (rung.scores[trial], -trial))]
        return None

    def front(self) -> list[Trial]:
        """The trials at the last rung that no other dominates there, by id; with one objective the best ones."""
        ids = sorted(self.rungs[self.last].scores)
        scores = [self.rungs[self.last].scores[i] for i in ids]
        return [self.trials[ids[i]] for i in front.fronts(scores)[0]] if ids else []

    def refuse_all_failed(self) -> None:
        """NumericsError with the commonest code where every trial has failed."""
        if self.trials and all(trial.state == FAILED for trial in self.trials):
            code, n = Counter(trial.code for trial in self.trials).most_common(1)[0]
            first = next(trial for trial in self.trials if trial.code == code)
            raise NumericsError(f"all {len(self.trials)} trials failed, {n} of them with {code}; narrow [space], or mend what "
                                f"they have in common. Trial {first.id}: {first.message}")

    def apply(self, record: Mapping[str, Any]) -> None:
        """Takes one record. CheckpointError for one that cannot follow those before it."""
        change = CHANGES.get(str(record.get("kind")))
        if change is None:
            raise CheckpointError(f'the journal has a record of the unknown kind "{record.get("kind")}"; '
                                  "is it of a newer version?")
        try:
            change(self, record)
        except (KeyError, TypeError, IndexError, ValueError, AssertionError):
            raise CheckpointError(f"record {self.records + 1} of the journal does not follow from those before it: "
                                  f"{json.dumps(record, default=str)[:200]}") from None
        self.records += 1

    def _start(self, record: Mapping[str, Any]) -> None:
        trial = Trial(record["trial"], dict(record["values"]), record["rung"], attributes=record.get("attributes", {}))
        assert trial.id == len(self.trials) and 0 <= trial.rung <= self.last
        self.trials.append(trial)
        self.asked.add(point_text(trial.values))
        self.open[trial.id, trial.rung] = RUNNING

    def _promote(self, record: Mapping[str, Any]) -> None:
        trial, rung = self._trial(record), record["rung"]
        assert trial.state == PAUSED and trial.reached < rung <= self.last
        self.rungs[trial.rung].promoted.add(trial.id)
        del self.paused[trial.id]
        trial.state, trial.rung = RUNNING, rung
        self.open[trial.id, rung] = RUNNING

    def _result(self, record: Mapping[str, Any]) -> None:
        trial, rung = self._trial(record), record["rung"]
        del self.open[trial.id, rung]
        if not trial.results:
            self.told.append(trial.id)
        trial.results[rung] = dict(record["values"])
        trial.score = front.score_of(trial.results[rung], self.objectives)
        trial.state = FINISHED if rung == self.last else PAUSED
        if trial.state == PAUSED:
            self.paused[trial.id] = None
        self.rungs[rung].add(trial.id, trial.score)

    def _fail(self, record: Mapping[str, Any]) -> None:
        trial, rung = self._trial(record), record["rung"]
        del self.open[trial.id, rung]
        if not trial.results:
            self.told.append(trial.id)
        trial.state, trial.code, trial.score = FAILED, str(record["code"]), None
        trial.message = str(record.get("message", ""))
        self.rungs[rung].add(trial.id, None)

    def _stop(self, record: Mapping[str, Any]) -> None:
        trial = self._trial(record)
        del self.paused[trial.id]
        trial.state = STOPPED

    def _lost(self, record: Mapping[str, Any]) -> None:
        job = record["trial"], record["rung"]
        assert self.open[job] == RUNNING
        self.open[job] = self.trials[job[0]].state = LOST

    def _again(self, record: Mapping[str, Any]) -> None:
        job = record["trial"], record["rung"]
        assert self.open[job] == LOST
        self.open[job] = self.trials[job[0]].state = RUNNING

    def _exchange(self, record: Mapping[str, Any]) -> None:
        trial = self._trial(record)
        trial.values = dict(record["values"])
        if trial.state == FAILED and record.get("from", trial.id) != trial.id:
            trial.state, trial.code, trial.message = PAUSED, "", ""
            self.paused[trial.id] = None

    def _trial(self, record: Mapping[str, Any]) -> Trial:
        number: int = record["trial"]
        assert 0 <= number < len(self.trials)
        found: Trial = self.trials[number]
        return found


CHANGES: dict[str, Callable[[Table, Mapping[str, Any]], None]] = {
    "start": Table._start, "promote": Table._promote, "result": Table._result, "fail": Table._fail, "stop": Table._stop,
    "lost": Table._lost, "again": Table._again, "exchange": Table._exchange, "job": lambda table, record: None}


def point_text(values: Values) -> str:
    """A point of the space as text, equal for equal points."""
    return json.dumps(values, sort_keys=True)


def result(trial: int, rung: int, values: Mapping[str, Any], **about: Any) -> Record:
    """The record of what a trial has measured at a rung; `about`: seconds, group, whatever else the journal should keep."""
    return {"kind": "result", "trial": trial, "rung": rung, "values": dict(values), **about}


def failure(trial: int, rung: int, code: str, message: str, **about: Any) -> Record:
    """The record of a trial that has failed on its way to a rung."""
    return {"kind": "fail", "trial": trial, "rung": rung, "code": code, "message": message, **about}


def lost_jobs(table: Table) -> list[Record]:
    """The records that a study which goes on begins with: nobody runs any more what was running."""
    return [{"kind": "lost", "trial": trial, "rung": rung} for (trial, rung), state in table.open.items() if state == RUNNING]
