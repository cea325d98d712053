"""Pruners: which trial goes on to the next rung, and when a new one starts.

    none        every trial runs to the last rung at once
    halving     synchronous successive halving (Jamieson and Talwalkar 2016): a rung is waited for, then its best 1/eta go on
    asha        asynchronous, by promotion (Li et al., 1810.05934, algorithm 2): whoever is free promotes a trial that is among
                the best 1/eta of its rung so far, or starts a new one
    asha-stop   its stopping variant: a trial goes on at once if it is among the best 1/eta of its rung so far, or else ends
    median      a trial ends whose best result so far is worse than the median at this rung of the trials that have finished
                (Golovin et al. 2017, "Vizier", as Optuna's MedianPruner has it)

A pruner sees the `Table` alone and keeps nothing itself, so any rank decides alike, and a journal is all that a study needs.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

from mpitrain.errors import ConfigError
from mpitrain.registry import Registry
from mpitrain.search.table import FINISHED, Table, Trial


@dataclass(frozen=True)
class Start:
    """This trial is new, or (`again`) was lost: train it to `rung` from the beginning."""

    trial: Trial
    rung: int
    again: bool = False


@dataclass(frozen=True)
class Promote:
    """Train this trial on to `rung` from its pause; `again` where a job that did so was lost."""

    trial: Trial
    rung: int
    again: bool = False


@dataclass(frozen=True)
class Stop:
    """This trial does not go on after `rung`."""

    trial: Trial
    rung: int


@dataclass(frozen=True)
class New:
    """The sampler is to be asked for a trial, to train to `rung`."""

    rung: int = 0


@dataclass(frozen=True)
class Wait:
    """Nothing can be done until another result is there."""


@dataclass(frozen=True)
class Done:
    """The study is over."""


Choice: TypeAlias = New | Promote | Stop | Wait | Done


class Pruner(Protocol):
    eta: int

    def decide(self, table: Table) -> Choice:
        """What whoever is free does next."""


PRUNERS: Registry[type] = Registry("pruner")


def idle(table: Table) -> Wait | Done:
    """What is left where nothing can be promoted and nothing started."""
    return Wait() if table.open else Done()


@PRUNERS.register("none")
class Unpruned:
    """Every trial runs to the last rung at once."""

    eta = 1

    def decide(self, table: Table) -> Choice:
        return New(table.last) if table.left > 0 else idle(table)


class Rungs:
    """What pruners with rungs have in common: eta, at least 2."""

    def __init__(self, eta: int = 3):
        self.eta = eta


@PRUNERS.register("halving")
class Halving(Rungs):
    """Synchronous: all trials of a rung are waited for, then its best 1/eta, at least one, go on."""

    def decide(self, table: Table) -> Choice:
        entrants = table.planned
        for number, rung in enumerate(table.rungs[:-1]):
            if len(rung) < entrants:                          # some are on their way, or have not started
                break
            entrants = max(entrants // self.eta, 1)
            for trial in rung.best(entrants):
                if trial not in rung.promoted:
                    return Promote(table.trials[trial], number + 1)
            entrants = min(entrants, len(rung.scores))
        return New() if table.left > 0 else idle(table)


@PRUNERS.register("asha")
class Asha(Rungs):
    """Asynchronous successive halving by promotion: the highest rung that has a trial to promote comes first.

    A study too small for its rungs (fewer than eta trials at one of them) ends with the best one promoted to the last.
    """

    def decide(self, table: Table) -> Choice:
        for number in range(table.last - 1, -1, -1):
            rung = table.rungs[number]
            for trial in rung.best(len(rung) // self.eta):
                if trial not in rung.promoted:
                    return Promote(table.trials[trial], number + 1)
        if table.left > 0:
            return New()
        best = table.best()
        if not table.open and best is not None and best.reached < table.last:
            return Promote(best, best.reached + 1)
        return idle(table)


class Stopping(Rungs):
    """A trial that has reached a rung goes on or ends there; who has finished it asks next, so nobody waits."""

    def decide(self, table: Table) -> Choice:
        for number in table.paused:
            trial = table.trials[number]
            return Promote(trial, trial.rung + 1) if self.keep(trial, trial.rung, table) else Stop(trial, trial.rung)
        return New() if table.left > 0 else idle(table)

    def keep(self, trial: Trial, rung: int, table: Table) -> bool:
        raise NotImplementedError


@PRUNERS.register("asha-stop")
class AshaStop(Stopping):
    """Among the best 1/eta of those that have reached the rung so far; as long as they are fewer than eta, the best of them."""

    def keep(self, trial: Trial, rung: int, table: Table) -> bool:
        reached = table.rungs[rung]
        if trial.score is None:
            return False
        best = reached.best(max(len(reached.scores) // self.eta, 1))
        return trial.id in best or len(trial.score) == 1 and trial.score >= reached.scores[best[-1]]


@PRUNERS.register("median")
class Median(Stopping):
    """No worse, at its best rung so far, than the median at this rung of the trials that have finished, once `startup` have."""

    objectives: ClassVar[int] = 1                 # it compares single numbers

    def __init__(self, eta: int = 3, startup: int = 5):
        super().__init__(eta)
        if startup < 1:
            raise ConfigError(f"search.startup must be at least 1, found {startup}")
        self.startup = startup

    def keep(self, trial: Trial, rung: int, table: Table) -> bool:
        finished = [other.id for other in table.trials if other.state == FINISHED]
        if trial.score is None:
            return False
        if len(finished) < self.startup:
            return True
        scores = table.rungs[rung].scores
        there = [scores[other][0] for other in finished if other in scores]
        own = max(r.scores[trial.id][0] for r in table.rungs[:rung + 1] if trial.id in r.scores)
        return not there or own >= statistics.median(there)
