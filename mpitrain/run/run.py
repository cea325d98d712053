"""A run: from a configuration and a communicator to its results, on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain import nn
from mpitrain.backend import keep_freed_memory
from mpitrain.checkpoint import choosing, store
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.comm.job import guard
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import set_for_survivors, start, started
from mpitrain.comm.job.together import on_first
from mpitrain.comm.watch.pulse import Pulse, pulse_of
from mpitrain.comm.watch.unwatched import NOBODY
from mpitrain.config import Config, changed, to_toml
from mpitrain.errors import ConfigError, UsageError
from mpitrain.placement.bytes import Forecast
from mpitrain.plan.memory_lines import as_json, report_lines
from mpitrain.run import resuming
from mpitrain.run.session import Session, before_mpi, look_at_files, n_virtual, predict_memory
from mpitrain.train.build import experiment, measured_cut
from mpitrain.train.build.assembly import Job
from mpitrain.train.build.from_config import build, checkpoint_folder, make_rate, observers_of
from mpitrain.train.build.model import make_model
from mpitrain.train.machine import environment
from mpitrain.train.observers.beats import Beats
from mpitrain.train.observers.log import plain_values
from mpitrain.train.observers.memory import Memory
from mpitrain.train.observers.observer import Observer, add_data
from mpitrain.train.observers.record import MetricsFile
from mpitrain.train.observers.stragglers import Stragglers
from mpitrain.train.observers.time_left import TimeLeft, end_of_time

if TYPE_CHECKING:
    from mpitrain.run.evaluating import InUse
    from mpitrain.run.survivors import Survivors


@dataclass(frozen=True)
class Trained:
    """The results of a run, equal on all its ranks: the last evaluation, and the hashes of run.json."""

    steps: int
    metrics: dict[str, float]
    hashes: dict[str, str]


@dataclass(frozen=True)
class Evaluated:
    """The validation metrics of the checkpoint of a step, equal on all ranks."""

    step: int
    metrics: dict[str, float]


class Run(AbstractContextManager["Run"]):
    """A run of `config` on the ranks of `comm`, any communicator: all of them make it, call its methods and close it alike.

    Several may follow each other in one process, or go on side by side on communicators that have been split. An error that all
    ranks of a run meet alike (a wrong configuration) is raised, and leaves other runs alone; one that a rank of several meets by
    itself, in a method or in the run's `with` block, ends the whole job, since the others would wait for that rank. `process` has
    the request to stop. `files` gives the result of `session.look_at_files` if a program has looked before it started MPI.
    UsageError, on all ranks alike, without a communicator and after `close`.
    """

    def __init__(self, config: Config, comm: Any, *, process: Process | None = None, quiet: bool = False,
                 files: Callable[[], Any] | None = None):
        with guard.symmetric():
            if not comm or not hasattr(comm, "Create_cart"):
                raise UsageError(f"a run needs the communicator of its ranks, such as start().comm, found {comm!r}; a rank "
                                 "without one (MPI.COMM_NULL) makes no Run")
        self.config, self.comm, self.process, self.quiet = config, comm, process or Process(), quiet
        self._files = files or (lambda: look_at_files(config))
        self._session: Session | None = None
        self._survivors: Survivors | None = None
        self._closed = False

    @classmethod
    def of_job(cls, config: Config, process: Process | None = None, *, quiet: bool = False,
               parser: Popen[bytes] | None = None, look: Callable[[], Any] | None = None) -> Run:
        """The run of all ranks of the job; it starts MPI. Ranks are watched (`train.stall_s`) if `process` runs the program.
        `parser` is that of `files.parser`, if rank 0 has started one before its imports. `look` describes, on rank 0, other data
        than the configuration's."""
        keep_freed_memory()                                  # this may ask the compiler: nothing forks once MPI has started
        if process is not None and process.runs and process.pulse is NOBODY and started() is None:
            process.pulse = pulse_of(config.train.stall_s, config.train.start_s, config.train.stall)
        if config.train.on_lost != "stop":
            set_for_survivors(os.environ)
        files = before_mpi(look or (lambda: look_at_files(config, parser)))
        comm = start().comm
        if process is not None:
            process.pulse.started()
        return cls(config, comm, process=process, quiet=quiet, files=files)

    def _open(self) -> Session:
        """The session of the run, made at the first call."""
        with guard.symmetric():
            if self._closed:
                raise UsageError("this run is closed; make another one: Run(config, comm)")
        if self._session is None:
            self.process.pulse.opens()
            self._session = Session(self.config, self.comm)
            self.process.tells_others = self._session.mesh.revoke
            if self._survivors is not None:
                self._survivors.session = self._session
            self._session.open(self.config, self._files, self.process.pulse)
        return self._session

    def close(self) -> None:
        """Frees channels and communicators; it communicates, but not again. A program may do so, too, after an error that all
        ranks had alike."""
        session, self._session, self._closed = self._session, None, True
        if session is not None:
            session.close() if self._survivors is None else self._survivors.close(session)
        self.process.pulse.rest()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:                                    # freeing is collective: not after a rank has failed
            self.close()
        elif self.comm.size > 1 and not guard.is_symmetric(error):
            self.process.fail(error)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """NaN and Inf are detected, and named, where they matter; an error of this rank alone ends the job."""
        with self.process.guarding() if self.comm.size > 1 else nullcontext(), np.errstate(all="ignore"):
            yield

    def train(self, *, resume: str | None = None, overwrite: bool = False, profile: bool = False,
              observers: Sequence[Observer] = (), change: Sequence[str] = (), strict: bool = False) -> Trained:
        """Trains in the run folder; `observers` are told beside those of the configuration.

        `resume` is "latest" (there must be a checkpoint) or "auto", `overwrite` deletes the run that is there. Keys of `change`
        may differ from the checkpoint's; of others, those that decide which rows are seen are refused, with `strict` all.
        Raises Stopped, with a checkpoint saved, where the process was asked to stop.
        """
        folder = RunFolder(self.config.run.out)

        def once(comm: Any) -> Trained:
            if comm is None:
                return self._train(folder, resume, overwrite, profile, observers, change, strict)
            self._go_on_with(comm)
            return self._train(folder, "auto", False, profile, observers, change, False)

        with self._at_work():
            if self.config.train.on_lost == "stop" or self.comm.size == 1:      # nobody goes on without the only one
                return once(None)
            from mpitrain.run.survivors import Survivors
            self._survivors, self.process.goes_on = Survivors(self.config, self.comm, self.process.pulse), True
            self.process.pulse.leave_ends()
            return self._survivors.train(once, folder)

    def _go_on_with(self, comm: Any) -> None:
        """The rest of the run is that of these ranks; the others were lost."""
        files = self._files() if self._session is None or self._session.files is None else self._session.files
        self.comm, self._session, self._files, self.process.went_on = comm, None, lambda: files, True
        self.config = changed(self.config, mesh={"dp": 0})

    def _train(self, folder: RunFolder, resume: str | None, overwrite: bool, profile: bool, observers: Sequence[Observer],
               change: Sequence[str], strict: bool) -> Trained:
        with ExitStack() as cleanup:
            session = self._open()
            found = None
            if on_first(session.control, lambda: resuming.continues(folder, resume)):
                self._take(session, folder, resume, overwrite, cleanup)
                found = self._find(session, folder, change, strict)
            job = self._build(session, found)
            forecast = predict_memory(self.config, session, job)
            job.trainer.notes.insert(0, session.summary(make_model(self.config).count_parameters(), job.plan))
            job.trainer.notes += session.notes + session.told_once([environment.slow_kernels()])
            with guard.symmetric():
                asked = [*observers_of(self.config), *observers]
            if isinstance(self.process.pulse, Pulse):
                asked.append(Beats(self.process.pulse, job.timeline))
            if found is None:
                self._take(session, folder, resume, overwrite, cleanup)
            about = session.describe(self.config)
            mine = on_first(session.control, lambda: experiment.record(self.config, session.files, about, job.plan.steps))
            if found is None:
                kept = on_first(session.control, lambda: resuming.begin(mine))
            else:
                kept = self._go_on(session, job, found, folder, mine, change, strict)
            if profile:
                from mpitrain.train.observers.profile import Profile
                asked.append(Profile(job.timeline, session.mesh.channel(session.mesh.axes, "clocks"), folder))
            return self._fit(session, job, folder, forecast, asked, about, kept)

    def _take(self, session: Session, folder: RunFolder, resume: str | None, overwrite: bool, cleanup: ExitStack) -> None:
        """Holds the run folder until `cleanup`: errors are written there. It communicates."""
        on_first(session.control, lambda: resuming.open_folder(folder, resume, overwrite))
        if self.comm.rank == 0:
            cleanup.callback(folder.close)
        cleanup.enter_context(self.process.recording(folder.path))
        self.process.pulse.keep_in(folder.path)

    def _find(self, session: Session, folder: RunFolder, change: Sequence[str], strict: bool) -> Checkpoint:
        """The checkpoint to go on from, if it is this run's, of these data. It communicates."""
        found = store.latest(folder.checkpoints, session.control, store.RESUME, warn=store.refuse_damage if strict else None)
        on_first(session.control, lambda: resuming.refuse_other(folder.about(), found, session.files, allowed=change))
        return found

    def _build(self, session: Session, continued: Checkpoint | None) -> Job:
        """The job, with the parameters that model.init_from names, perhaps of the very run that --overwrite deletes then."""
        config, control = self.config, session.control
        stages = config.mesh.stages if continued is None else \
            measured_cut.kept(config.mesh.stages, n_virtual(config), continued.meta.get("choices"))
        with guard.symmetric():
            job = build(config, session.inputs, session.mesh, stages=stages, quiet=self.quiet)
            if config.distil.teacher:
                from mpitrain.train.build.teacher import give_teacher  # few runs have one
                give_teacher(job, config, session.inputs)
        job.trainer.stop = self.process.stop
        if config.model.init_from and continued is None:
            found = store.latest(checkpoint_folder(config.folder / config.model.init_from), control, store.START)
            with guard.symmetric():
                job.load(found)
        return job

    def _go_on(self, session: Session, job: Job, found: Checkpoint, folder: RunFolder, mine: dict[str, Any],
               change: Sequence[str], strict: bool) -> dict[str, Any]:
        """Continues from a checkpoint; what the run keeps of its experiment. It communicates."""
        kept, told = on_first(session.control, lambda: resuming.go_on(
            folder.about(), found, mine, partial(make_rate, self.config), allowed=change, strict=strict))
        with guard.symmetric():
            before = len(job.trainer.notes)
            with resuming.blaming(kept["changes"], told):
                job.resume(found)
            kept["changes"] += resuming.numerics_changed(job.trainer.notes[before:], found, allowed=change, strict=strict)
        job.trainer.notes += told
        return dict(kept)

    def _fit(self, session: Session, job: Job, folder: RunFolder, forecast: Forecast, asked: Sequence[Observer],
             about: dict[str, Any], kept: dict[str, Any]) -> Trained:
        config, control, trainer = self.config, session.control, job.trainer
        latest = on_first(control, lambda: end_of_time(config.train.stop_before))
        memory = Memory(job, lambda uses: report_lines(forecast, uses))
        if self.comm.rank == 0:
            trainer.observers += [MetricsFile(folder.metrics)]
            trainer.observers += [Stragglers([place.host for place in session.places])] if self.comm.size > 1 else []
        trainer.observers += [memory, *asked]
        saver = job.keep_in(folder, {"seed": config.run.seed, "model": {"name": config.model.name, **config.model.arguments},
                                     "mesh": about["mesh"], **kept})
        about |= {"id": kept["id"], "changes": kept["changes"], **({"numerics": job.numerics} if job.numerics else {})}
        if self._survivors is not None:
            about |= self._survivors.begin(session, job, saver)

        def begin() -> None:
            about.update({key: value for key, value in folder.about().items() if key == "restarts"})      # of `supervise`
            folder.write_text(folder.config, to_toml(config))
            folder.truncate_metrics(trainer.update.step)
            folder.write_json(folder.run_json, about | {"status": "running", "memory": as_json(forecast, [])})
        on_first(control, begin)
        if latest is not None and self.comm.rank == 0:
            trainer.observers.append(TimeLeft(latest, trainer.stop, saver.save_s))
        if self.comm.size > 1:
            from mpitrain.train.observers.agreement import Agreement
            trainer.observers.append(Agreement(job.state, control, config.train.compare_every))
        self.process.on_terminate(trainer.terminated)
        began = time.time()
        metrics = trainer.fit()
        hashes = job.state.hashes()
        record = about | hashes | trainer.bad_steps.record() | {
            "status": "done", "steps": job.plan.steps, "seconds": round(time.time() - began, 3), "metrics": plain_values(metrics),
            "memory": as_json(forecast, memory.uses), "checkpoints": saver.times()}

        def end() -> None:
            refused = add_data(record, trainer.found)
            folder.write_json(folder.run_json, record)
            if refused:
                raise ConfigError(f"{refused[0]}; the run is done, and run.json has all but that", file=folder.run_json)
        on_first(control, end)
        return Trained(job.plan.steps, metrics, hashes)

    @contextmanager
    def use(self, source: Path, step: int | str | None = None) -> Iterator[InUse]:
        """This rank's part of the model of a checkpoint of the run in `source`; errors inside are as those of a method."""
        from mpitrain.run import evaluating
        with self._at_work():
            session = self._open()
            found = choosing.chosen(source / "checkpoints", step, session.control, evaluating.USE)
            with guard.symmetric():
                used = evaluating.put_to_use(self.config, session, found)
            yield used

    def calibrate(self, model: nn.Module, layers: Sequence[str], rows: int) -> dict[str, float]:
        """The scales of the inputs of layers (paths) of a whole saved model, over the first training rows; equal on any ranks."""
        from mpitrain.run import calibrating
        with self._at_work():
            return calibrating.calibrate(self._open(), model, layers, rows)

    def evaluate(self, source: Path, step: int | str | None = None) -> Evaluated:
        """The metrics, on the validation data, of a checkpoint of the run in the folder `source`: of the newest one, of that of a
        step, or of the "best"."""
        from mpitrain.run import evaluating
        with self._at_work():
            return Evaluated(*evaluating.evaluate(self.config, self._open(), source, self.process.pulse.span, step))
