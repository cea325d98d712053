"""What a free group of ranks does next, from the records of a study so far, by its pruner and its sampler.

With ``order = "free"`` a decision sees all results that are there. With ``order = "fixed"`` it must not depend on which group was
faster, so time is acted: `ahead` workers take jobs, a job lasts as many ticks as it has epochs, and results are seen in the
order in which these workers would finish, ties by the order of the decisions. A decision that needs a result which is not there
yet waits for it. So the decisions, and with them all trials, are the same on any number of groups; up to `ahead` have work.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.search.pruners import Choice, Done, New, Promote, Pruner, Start, Stop, Wait
from mpitrain.search.samplers import Sampler
from mpitrain.search.table import Record, Table

Action: TypeAlias = Start | Promote | Wait | Done


class Decisions:
    """Every rank has one, and applies all records of the journal in their order, its own among them.

        for record in records: decisions.apply(record)         # what others have done since
        action, new = decisions.next()                          # applied here already: write `new` to the journal, then act
    """

    def __init__(self, table: Table, pruner: Pruner, sampler: Sampler):
        self.table, self.pruner, self.sampler = table, pruner, sampler

    def apply(self, record: Mapping[str, Any]) -> None:
        self.table.apply(record)

    def next(self) -> tuple[Action, list[Record]]:
        """What to do, and the records of it. Only one rank of all may ask at a time."""
        if (lost := self.table.lost()) is not None:
            return self._again(lost)
        records: list[Record] = []
        while True:
            action, record = self.choose(self.table)
            if record is not None:
                self.apply(record)
                records.append(record)
            if not isinstance(action, Stop):
                return self._with_trial(action), records

    def choose(self, table: Table) -> tuple[Choice, Record | None]:
        """The pruner's choice for the state in `table`, and its record. ConfigError for one that cannot be."""
        choice = sound(self.pruner.decide(table), self.pruner, table)
        if isinstance(choice, New):
            number = len(table.trials)
            values, attributes = self.sampler.ask(table, number)
            more = {"attributes": dict(attributes)} if attributes else {}
            return choice, {"kind": "start", "trial": number, "rung": choice.rung, "values": values, **more}
        if isinstance(choice, Promote | Stop):
            return choice, {"kind": type(choice).__name__.lower(), "trial": choice.trial.id, "rung": choice.rung}
        return choice, None

    def _with_trial(self, action: Promote | Wait | Done | New | Start) -> Action:
        """The action with the trial of this table."""
        if isinstance(action, New):
            return Start(self.table.trials[-1], action.rung)
        return Promote(self.table.trials[action.trial.id], action.rung) if isinstance(action, Promote) else action

    def _again(self, job: tuple[int, int]) -> tuple[Action, list[Record]]:
        record = {"kind": "again", "trial": job[0], "rung": job[1]}
        self.apply(record)
        trial = self.table.trials[job[0]]
        return (Promote if trial.results else Start)(trial, job[1], again=True), [record]


class FixedDecisions(Decisions):
    """Decisions of ``order = "fixed"``: `seen` is the table that they are taken on, and `ahead` the number of acted workers.

    The record of a decision has `seen`, the number of results that it was taken on, which is all that a rank needs to follow.
    """

    def __init__(self, table: Table, pruner: Pruner, sampler: Sampler, ahead: int):
        super().__init__(table, pruner, sampler)
        self.ahead = ahead
        self.seen = Table(table.epochs, table.objectives, table.planned)
        self.outcomes: dict[tuple[int, int], Mapping[str, Any]] = {}       # that are there and not seen
        self.running: list[tuple[int, int, tuple[int, int]]] = []          # (its end in ticks, number of the decision, job)
        self.now = self.decided = self.n_seen = 0

    def apply(self, record: Mapping[str, Any]) -> None:
        super().apply(record)
        kind = record["kind"]
        if kind in ("result", "fail"):
            self.outcomes[record["trial"], record["rung"]] = record
        elif kind in ("start", "promote", "stop"):
            while self.n_seen < record["seen"]:
                if not (self.running and self._see()):
                    raise CheckpointError(f"record {self.table.records} of the journal was decided on results that are not "
                                          "there: was the study run with other settings of [search]?")
            reached = self.seen.trials[record["trial"]].reached if kind == "promote" else -1
            self.seen.apply(record)
            if kind != "stop":
                epochs = self.seen.epochs[record["rung"]] - (self.seen.epochs[reached] if reached >= 0 else 0)
                heapq.heappush(self.running, (self.now + epochs, self.decided, (record["trial"], record["rung"])))
            self.decided += 1
        elif kind == "exchange":
            self.seen.apply(record)

    def next(self) -> tuple[Action, list[Record]]:
        if (lost := self.table.lost()) is not None:
            return self._again(lost)
        records: list[Record] = []
        while True:
            if len(self.running) >= self.ahead and not self._see():
                return Wait(), records
            action, record = self.choose(self.seen)
            if record is not None:
                record["seen"] = self.n_seen
                self.apply(record)
                records.append(record)
            if isinstance(action, Wait):
                if not self._see():
                    return action, records
            elif not isinstance(action, Stop):
                return self._with_trial(action), records

    def _see(self) -> bool:
        """Looks at the outcome of the job that ends next; False where it is not there yet."""
        end, _, job = self.running[0]
        outcome = self.outcomes.pop(job, None)
        if outcome is None:
            return False
        heapq.heappop(self.running)
        self.seen.apply(outcome)
        self.now, self.n_seen = end, self.n_seen + 1
        return True


def sound(choice: Choice, pruner: Pruner, table: Table) -> Choice:
    """`choice`, as a pruner made it on `table`. ConfigError for what no study can follow, as one of a user's may give: the study
    would wait, or start trials, for ever."""
    trial, rung = getattr(choice, "trial", None), getattr(choice, "rung", 0)
    for wrong, why in (
            (not isinstance(choice, Choice), "expected New, Promote, Stop, Wait or Done of mpitrain.search.pruners"),
            (isinstance(choice, New) and table.left < 1, f"all {table.planned} trials have started: see table.left"),
            (isinstance(choice, New | Promote) and rung not in range(len(table.rungs)), f"rungs are 0 to {table.last}"),
            (isinstance(choice, Wait) and not table.open, "no trial is running whose result could be waited for"),
            (isinstance(choice, Promote | Stop) and getattr(trial, "id", None) not in table.paused, "the trial is not paused"),
            (isinstance(choice, Promote) and rung <= getattr(trial, "reached", rung), "the trial has reached that rung")):
        if wrong:
            told = f"{type(choice).__name__} of trial {getattr(trial, 'id', trial)} to rung {rung}" if trial else repr(choice)
            raise ConfigError(f"search.pruner: {type(pruner).__name__}.decide returned {told}, and {why}")
    return choice


def replayed(decisions: Decisions, records: Sequence[Mapping[str, Any]]) -> Decisions:
    """`decisions` after all records of a journal, whose header is not among them."""
    for record in records:
        decisions.apply(record)
    return decisions
