"""A trial on the ranks of a group: a run that pauses where the study says so, and its outcome as a record of the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpitrain.checkpoint.folders import remove_all
from mpitrain.comm.job import guard
from mpitrain.comm.job.failure import describe
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.together import on_first
from mpitrain.config import Config, changed
from mpitrain.errors import DamagedError, MpitrainError, print_warning
from mpitrain.run.run import AsTrial, Run, Trained
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
        self.ended, self.waited = time.perf_counter(), 0.0
        if self._since is not None:
            self.busy, self._since = self.busy + self.ended - self._since, None

    def take(self) -> dict[str, Any]:
        """The seconds since the last outcome, for its record."""
        busy, set_up = self.busy, self.set_up_s
        self.busy, self.set_up_s = 0.0, None
        return {"train_s": round(busy, 6), **({} if set_up is None else {"set_up_s": round(set_up, 6)})}


class TrialRuns:
    """The trials of one group, one after the other; all ranks of the group make one, and call it alike.

    `ask(outcome)` tells the study what has come of a trial and gives the next job, or None, on all ranks. `room` is the memory
    that a rank may take.
    """

    def __init__(self, study: Study, groups: Groups, process: Process, costs: Costs, room: int,
                 ask: Callable[[Callable[[], Record]], Job | None]):
        self.study, self.groups, self.process, self.costs, self.room, self.ask = study, groups, process, costs, room, ask
        self.clock = Clock()
        self._began = 0.0                                     # when the work on the job began
        self._plan: Plan | None = None

    def train(self, job: Job) -> Job | None:
        """Trains a trial to its rung and gives the group's next job. What ends a trial alike on its ranks is its outcome; all
        other errors are raised. The study hears of it when the trial's folder is free: another group may go on at once."""
        run: Run | None = None
        self._plan, self._began = None, time.perf_counter()
        try:
            config = self._config(job)
            while True:
                run = Run(config, self.groups.comm, process=self.process, quiet=True, after=self.groups.session)
                try:
                    with run:
                        trained = run.train(resume="auto", observers=[self.clock],
                                            as_trial=AsTrial(lambda plan: self._pauses(job, plan)))
                    break
                except DamagedError as error:
                    self._begin_anew(job, error)
        except Exception as error:
            code = self._code(error)
            if code is None:
                raise
            if run is not None:
                run.close()
            message = error.message if isinstance(error, MpitrainError) else describe(error).message
            step = getattr(error, "step", None) or 0
            return self.ask(lambda: self._failed(job, code, message, step))
        return self.ask(lambda: self._reached(job, config, trained))

    def _begin_anew(self, job: Job, error: DamagedError) -> None:
        """Removes a trial's checkpoints, of which none is whole: its run begins again, and comes to the same results. What it has
        spent of privacy stays counted. Raises the error where it is of other checkpoints. It communicates."""
        folder = self.study.trial_folder(job.trial) / "checkpoints"

        def remove() -> None:
            if error.file != str(folder) or remove_all(folder):
                raise error
            print_warning(f"trial {job.trial}: {error.message}; they are removed, and the trial is trained anew")
        on_first(self.groups.session.control, remove)

    def _config(self, job: Job) -> Config:
        """The configuration of a job's trial. ConfigError, on all ranks, where it cannot be or would not fit."""
        session = self.groups.session
        with guard.symmetric():
            config = configured(self.study, job, self.groups.threads)
        on_first(session.control, lambda: refuse_too_large(config, self.costs.inputs, session.mesh.lengths, self.room))
        return config

    def _pauses(self, job: Job, plan: Plan) -> Pauses:
        """The end of the job's rung, unless that is the trial's own end."""
        self._plan = plan
        steps = [self.study.steps_of(job.rung, plan.steps_per_epoch)] if job.rung < len(self.study.rungs) - 1 else []
        return Pauses(steps, lambda step, metrics: False)

    # -- records, made by the group's first rank -------------------------------------------------------------------------

    def _reached(self, job: Job, config: Config, trained: Trained) -> Record:
        assert self._plan is not None
        folder, batch = self.study.trial_folder(job.trial), self._plan.batch_size
        metrics = folder / "metrics.jsonl"
        values = {**trained.metrics, **self.costs.of_shapes(config), **self.costs.of_run(metrics, trained.steps, batch)}
        if unknown := self.costs.unknown(values, metrics, trained.steps):
            return self._unknown(job, trained, values, unknown)
        return result(job.trial, job.rung, values, samples=trained.steps * batch, **trained.hashes, **self._about())

    def _unknown(self, job: Job, trained: Trained, values: Mapping[str, Any], why: str) -> Record:
        """The record of a trial that trained, and cannot be judged."""
        return self._failed(job, "E_CONFIG", f"{why}; set energy.source to one that counts, or take it out of search.objective",
                            trained.steps)

    def _failed(self, job: Job, code: str, message: str, step: int) -> Record:
        samples = step * self._plan.batch_size if self._plan is not None else 0
        return failure(job.trial, job.rung, code, message, samples=samples, **self._about())

    def _about(self) -> dict[str, Any]:
        busy_s = time.perf_counter() - self._began
        return {"group": self.groups.number, "time": time.time(), "busy_s": round(busy_s, 6), **self.clock.take()}

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
