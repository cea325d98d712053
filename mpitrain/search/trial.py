"""A trial on the ranks of a group: a run that pauses where the study says so, and its outcome as a record of the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpitrain.comm.job import guard
from mpitrain.comm.job.failure import describe
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.together import on_first
from mpitrain.config import Config, changed
from mpitrain.errors import MpitrainError
from mpitrain.run.run import Run, Trained
from mpitrain.search.cost import Costs, refuse_too_large
from mpitrain.search.groups import Groups
from mpitrain.search.study_file import Study
from mpitrain.search.table import Record, Trial, failure, result
from mpitrain.train.intervals import Pauses, Plan
from mpitrain.train.observers.observer import Observer, Watched

ENDS_A_TRIAL = frozenset(("E_NAN", "E_SHAPE", "E_CONFIG", "E_MESH", "E_MEMORY"))      # where all its ranks meet it alike


class Job(NamedTuple):
    """Something to do: train `trial`, of these values, until it has reached `rung`."""

    trial: int
    values: Mapping[str, Any]
    rung: int


class Clock(Observer):
    """The seconds that a group trains in, and those between: `set_up_s` from the end of the last training to this one's first
    step, less what the group waited for others."""

    def __init__(self) -> None:
        self.ended: float | None = None          # when the training before this one ended
        self.waited = 0.0                        # since then
        self.set_up_s: float | None = None
        self.busy = 0.0                          # since the last outcome
        self._since: float | None = None
        self._first = False

    def begin(self, run: Watched) -> None:
        self._since, self._first = time.perf_counter(), True

    def before_step(self, step: int) -> None:
        if self._first:
            self._first = False
            self.set_up_s = None if self.ended is None else time.perf_counter() - self.ended - self.waited

    def close(self) -> None:
        self.pause()
        self.ended, self.waited = time.perf_counter(), 0.0

    def pause(self) -> None:
        """Other things are done from here on."""
        if self._since is not None:
            self.busy += time.perf_counter() - self._since
            self._since = None

    def go_on(self) -> None:
        self._since = time.perf_counter()

    def take(self) -> dict[str, Any]:
        """The seconds since the last outcome, for its record."""
        busy, set_up = self.busy, self.set_up_s
        self.busy, self.set_up_s = 0.0, None
        return {"busy_s": round(busy, 6), **({} if set_up is None else {"set_up_s": round(set_up, 6)})}


class TrialRuns:
    """The trials of one group, one after the other; all ranks of the group make one, and call it alike.

    `ask(outcome)` tells the study what has come of a trial and gives the next job, or None, on all ranks. `room` is the memory
    that a rank may take.
    """

    def __init__(self, study: Study, groups: Groups, process: Process, costs: Costs, room: int,
                 ask: Callable[[Callable[[], Record]], Job | None]):
        self.study, self.groups, self.process, self.costs, self.room, self.ask = study, groups, process, costs, room, ask
        self.clock = Clock()
        self._job = Job(-1, {}, 0)                            # that is being trained
        self._next: Job | None = None                         # that comes after it
        self._plan: Plan | None = None

    def train(self, job: Job) -> Job | None:
        """Trains until the study has another job for this group. What ends a trial alike on its ranks is its outcome; all other
        errors are raised."""
        run: Run | None = None
        self._job, self._next, self._plan = job, None, None
        try:
            config = self._config(job)
            run = Run(config, self.groups.comm, process=self.process, quiet=True, after=self.groups.session)
            with run:
                trained = run.train(resume="auto", observers=[self.clock], pauses=self._pauses)
        except Exception as error:
            code = self._code(error)
            if code is None:
                raise
            if run is not None:
                run.close()
            message = error.message if isinstance(error, MpitrainError) else describe(error).message
            step = getattr(error, "step", None) or 0
            return self.ask(lambda: self._failed(code, message, step))
        return self._next if trained.paused else self.ask(lambda: self._finished(trained))

    def _config(self, job: Job) -> Config:
        """The configuration of a job's trial. ConfigError, on all ranks, where it cannot be or would not fit."""
        session = self.groups.session
        with guard.symmetric():
            config = configured(self.study, job, self.groups.threads)
        on_first(session.control, lambda: refuse_too_large(config, self.costs.inputs, session.mesh.lengths, self.room))
        return config

    def _pauses(self, plan: Plan) -> Pauses:
        epochs = self.study.rungs[self._job.rung:-1]
        self._plan = plan
        return Pauses([epoch * plan.steps_per_epoch for epoch in epochs], self._goes_on)

    def _goes_on(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether the trial trains on at once: it has reached a rung, and the group's next job is the same trial's."""
        self.clock.pause()
        job = self._job
        assert self._plan is not None and step == self.study.rungs[job.rung] * self._plan.steps_per_epoch
        self._next = self.ask(lambda: self._reached(step, metrics))
        self.clock.go_on()
        goes_on = self._next is not None and self._next.trial == job.trial
        if goes_on:
            assert self._next is not None
            self._job = self._next
        return goes_on

    # -- records, made by the group's first rank -------------------------------------------------------------------------

    def _reached(self, step: int, metrics: Mapping[str, float], **more: Any) -> Record:
        job, config = self._job, configured(self.study, self._job, self.groups.threads)
        assert self._plan is not None
        folder, batch = self.study.trial_folder(job.trial), self._plan.batch_size
        values = {**metrics, **self.costs.of_shapes(config), **self.costs.of_run(folder / "metrics.jsonl", step, batch)}
        return result(job.trial, job.rung, values, samples=step * batch, **more, **self._about())

    def _finished(self, trained: Trained) -> Record:
        return self._reached(trained.steps, trained.metrics, **trained.hashes)

    def _failed(self, code: str, message: str, step: int) -> Record:
        samples = step * self._plan.batch_size if self._plan is not None else 0
        return failure(self._job.trial, self._job.rung, code, message, samples=samples, **self._about())

    def _about(self) -> dict[str, Any]:
        return {"group": self.groups.number, "time": time.time(), **self.clock.take()}

    def _code(self, error: BaseException) -> str | None:
        """The code of an error that ends the trial alone."""
        alike = self.groups.comm.size == 1 or guard.is_symmetric(error)
        code = describe(error).code
        return code if alike and code in ENDS_A_TRIAL and not getattr(error, "of_study", False) else None


def configured(study: Study, job: Job, threads: int) -> Config:
    """The configuration of a trial. Its checkpoints are those that it needs to go on, unless the study's file says more."""
    config = study.config(Trial(job.trial, dict(job.values), job.rung))
    said = {override.partition("=")[0] for override in study.overrides}
    said |= {f"checkpoint.{key}" for key in study.tables.get("checkpoint", {})}
    fewer = {key: value for key, value in (("best", False), ("keep", 1)) if f"checkpoint.{key}" not in said}
    return changed(config, train={"threads": threads}, checkpoint=fewer)
