"""A member of a population: its runs from one exchange to the next, on one group of ranks, and how it judges in a tournament."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from mpitrain.comm.job import guard
from mpitrain.comm.job.failure import describe
from mpitrain.comm.job.together import on_first
from mpitrain.config import Config, changed
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.run.run import AsTrial, Run, Trained
from mpitrain.run.session import Session
from mpitrain.search.exchange import Exchange
from mpitrain.search.population import Exchange as Rule
from mpitrain.search.space import Values
from mpitrain.search.table import Record, result
from mpitrain.search.trial import Job, TrialRuns
from mpitrain.train.build.assembly import Job as Built
from mpitrain.train.build.evaluation import make_evaluator
from mpitrain.train.build.from_config import make_metrics
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.trial import try_samples
from mpitrain.train.intervals import Pauses, Plan


class Meetings(Protocol):
    """What a member knows of its population: a `members.Population`."""

    member: int
    members: int
    rule: Rule
    links: Exchange
    values: list[Values]
    done: int
    failed: list[int]
    stopped: bool

    def meet(self, turn: int, record: Record | None, built: Built | None) -> bool: ...


class MemberRun(Run):
    """A run whose parts can be had while it trains. One that `stands_in` for a run which has failed is at this step when it
    begins, with whatever weights, and takes those of another there."""

    built: Built
    stands_in: Callable[[Plan], int] | None = None
    inputs: Inputs                           # whose transforms have learned what they need

    def _fit(self, session: Session, job: Built, *rest: Any) -> Trained:
        self.built, self.inputs = job, session.inputs
        if self.stands_in is not None:
            job.trainer.update.step, job.trainer.evaluated = self.stands_in(job.plan), True
        return super()._fit(session, job, *rest)


class Members(TrialRuns):
    """The runs of one group's member, from one exchange to the next, and its outcomes."""

    def __init__(self, population: Meetings, runs: TrialRuns):
        super().__init__(runs.study, runs.groups, runs.process, runs.costs, runs.room, runs.ask)
        self.population, self.clock = population, runs.clock
        self.outcome: Record | None = None
        self._run: MemberRun | None = None
        self._judges: Any = None

    def train_on(self) -> None:
        """Trains the member to its end. Where it gets other values, its run goes on as another, from the same checkpoint; where
        it fails, one that has trained nothing stands in for it at the next meeting."""
        self._began = time.perf_counter()
        last, failure = len(self.study.rungs) - 1, None
        while self.outcome is None and not self.population.stopped:
            failed = self.population.member in self.population.failed
            if failed and (self.population.done == last or self.population.rule.rule != "pbt"):
                self.outcome = failure
                break
            job = Job(self.population.member, self.population.values[self.population.member], self.population.done)
            self._plan = self._run = self._judges = None
            try:
                config = self._config(job)
                self._run = MemberRun(config, self.groups.comm, process=self.process, quiet=True, after=self.groups.session)
                if failed:
                    self._run.stands_in = partial(steps_of, self.study.rungs[job.rung])
                with self._run as run:
                    trained = run.train(resume="auto", observers=[self.clock], change=tuple(self.study.space.dimensions),
                                        as_trial=AsTrial(partial(self._meetings, config, failure), synced=True))
            except Exception as error:
                failure = self._fails(error)
                if failed:                                    # it cannot even begin
                    self.outcome = failure
                continue
            if not trained.paused:
                self.outcome = self._record(Job(job.trial, job.values, last), config, trained)

    def _fails(self, error: Exception) -> Record:
        """The record of a member's failure, if it ends alone."""
        code = self._code(error)
        if code is None:
            raise error
        if self._run is not None:
            self._run.close()
        job = Job(self.population.member, {}, self.population.done)
        message = error.message if isinstance(error, MpitrainError) else describe(error).message
        if job.trial not in self.population.failed:
            self.population.failed.append(job.trial)
        return self._failed(job, code, message, getattr(error, "step", None) or 0)

    def _config(self, job: Job) -> Config:
        config = super()._config(job)
        own = self.population.rule.own_seed
        return changed(config, run={"seed": config.run.seed + job.trial}) if own else config

    def _meetings(self, config: Config, failure: Record | None, plan: Plan) -> Pauses:
        """The ends of all rungs but the last, where members meet; one that is through already is passed. A run that stands in
        for one that failed brings that failure along, and ends there."""
        self._plan = plan
        steps = {self.study.steps_of(rung, plan.steps_per_epoch): rung for rung in range(len(self.study.rungs) - 1)}

        def meets(step: int, metrics: dict[str, float]) -> bool:
            rung, population = steps[step], self.population
            if rung < population.done:
                return True
            assert self._run is not None
            job = Job(population.member, population.values[population.member], rung)
            self.clock.close()
            stands_in = self._run.stands_in is not None
            record = failure if stands_in else self._record(job, config, Trained(step, metrics, {}, paused=True))
            try:
                goes_on = population.meet(rung, record, self._run.built)
            except Exception as error:
                error.of_study = True                         # type: ignore[attr-defined]
                raise
            self._began = time.perf_counter()
            self.clock.begin(self._run.built.trainer)         # type: ignore[arg-type]
            return goes_on and not stands_in
        return Pauses(list(steps), meets)

    def _record(self, job: Job, config: Config, trained: Trained) -> Record:
        record: Record = on_first(self.groups.session.control, lambda: self._reached(job, config, trained))
        return record

    def _unknown(self, job: Job, trained: Trained, values: Mapping[str, Any], why: str) -> Record:
        """A member goes on: without a score it is the worst, and takes the weights of another."""
        assert self._plan is not None
        return result(job.trial, job.rung, values, unknown=why, samples=trained.steps * self._plan.batch_size, **trained.hashes,
                      **self._about())

    def judge(self, built: Built, partner: int) -> tuple[float, float] | None:
        """How good this member's model is on its tournament rows, and its partner's, by the study's first objective; larger is
        better. The run has its own state afterwards. It communicates."""
        objective = self.study.objectives[0]
        if self._judges is None:
            assert self._run is not None
            self._judges = _tournament(built, self._run.inputs, self.population)
        mine = self._judges.run()[objective.name]
        own = self.population.links.swap(built, partner)
        theirs = self._judges.run()[objective.name]
        self.population.links.put_back(built, own)
        sign = 1.0 if objective.higher else -1.0
        return (sign * mine, sign * theirs) if mine - mine == theirs - theirs == 0 else None


def steps_of(epochs: int, plan: Plan) -> int:
    return epochs * plan.steps_per_epoch


def _tournament(built: Built, inputs: Inputs, population: Meetings) -> Any:
    """The evaluator of a member's tournament rows: each N-th of the validation rows."""
    evaluator, config = built.trainer.evaluator, built.config
    assert evaluator is not None
    with guard.symmetric():
        rows = inputs.validation_rows[population.member::population.members]
        if not len(rows):
            raise ConfigError(f"a tournament of {population.members} members judges on validation rows, a part each, and there "
                              f"are {len(inputs.validation_rows)}; give more")
        own = dataclasses.replace(inputs, validation_rows=rows)
        tried = try_samples(evaluator.inference, evaluator.loss, own, built.context.placement, built.context.output_shape)
        return make_evaluator(evaluator.inference, evaluator.loss, own, built.context, make_metrics(config), tried,
                              cuts_parameters=built.policy.cuts_parameters, dtype=built.policy.layout.dtype,
                              span=built.timeline.span)
