"""A run: from a configuration and a communicator to its results, on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mpitrain.checkpoint import store
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.comm.job import guard
from mpitrain.comm.job.together import on_first
from mpitrain.comm.watch.pulse import Pulse
from mpitrain.config import changed, to_toml
from mpitrain.errors import ConfigError
from mpitrain.placement.bytes import Forecast
from mpitrain.plan.memory_lines import as_json, report_lines
from mpitrain.run import resuming
from mpitrain.run.ranks import Ranks
from mpitrain.run.session import Session, n_virtual, predict_memory
from mpitrain.train.build import experiment, measured_cut
from mpitrain.train.build.assembly import Job
from mpitrain.train.build.from_config import build, checkpoint_folder, machine_of, make_rate, observers_of
from mpitrain.train.build.model import make_model
from mpitrain.train.build.settings import can_leave_out
from mpitrain.train.evaluate import named_tables
from mpitrain.train.intervals import Pauses, Plan, evaluated_where
from mpitrain.train.machine import environment
from mpitrain.train.observers.beats import Beats
from mpitrain.train.observers.log import plain_values
from mpitrain.train.observers.memory import Memory
from mpitrain.train.observers.observer import Observer, add_data
from mpitrain.train.observers.record import MetricsFile
from mpitrain.train.observers.stragglers import Stragglers
from mpitrain.train.observers.time_left import TimeLeft, end_of_time

if TYPE_CHECKING:
    from mpitrain.run.survivors import Survivors


@dataclass(frozen=True)
class Trained:
    """The results of a run, equal on all its ranks: the last evaluation, and the hashes of run.json. A run that is `paused` has
    a checkpoint to go on from."""

    steps: int
    metrics: dict[str, float]
    hashes: dict[str, str]
    paused: bool = False


class AsTrial(NamedTuple):
    """How a run differs that is one of many of a study. `pauses(plan)` says where it may pause, with a checkpoint from which
    `resume` goes on with the bits of a run that did not. A step that is not finite ends it on all its ranks alike (NumericsError,
    which a rank of another run raises alone), so that the program can go on. Its texts and its folder's name are not synced to
    the disk: the study's journal has what counts, and a trial that a power cut took trains again to the same bits. They are
    `synced` where other runs go on with its state. Its memory is not predicted."""

    pauses: Callable[[Plan], Pauses]
    synced: bool = False


class Run(Ranks):
    """A run of `config` on the ranks of `comm`."""

    trains = True
    _survivors: Survivors | None = None
    _as_trial: AsTrial | None = None

    def _opens(self, session: Session) -> None:
        if self._survivors is not None:
            self._survivors.session = session

    def _ends(self, session: Session) -> None:
        session.close() if self._survivors is None else self._survivors.close(session)

    def train(self, *, resume: str | None = None, overwrite: bool = False, profile: bool = False,
              observers: Sequence[Observer] = (), change: Sequence[str] = (), strict: bool = False,
              as_trial: AsTrial | None = None) -> Trained:
        """Trains in the run folder; `observers` are told beside those of the configuration.


        `resume` is "latest" (there must be a checkpoint) or "auto", `overwrite` deletes the run that is there. Keys of `change`
        may differ from the checkpoint's; of others, those that decide which rows are seen are refused, with `strict` all.
        Raises Stopped, with a checkpoint saved, where the process was asked to stop.
        """
        folder, self._as_trial = RunFolder(self.config.run.out, synced=as_trial is None or as_trial.synced), as_trial

        def once(comm: Any) -> Trained:
            if comm is None:
                return self._train(folder, resume, overwrite, profile, observers, change, strict)
            self._go_on_with(comm)
            return self._train(folder, "auto", False, profile, observers, change, False)

        with self.at_work():
            if self.config.train.on_lost == "stop" or self.comm.size == 1:      # nobody goes on without the only one
                return once(None)
            from mpitrain.run.survivors import Survivors
            self._survivors, self.process.goes_on = Survivors(self.config, self.comm, self.process.pulse), True
            self._survivors.session = self._session           # of who has opened it before
            self.process.pulse.leave_ends()
            return self._survivors.train(once, folder)

    def rehearse(self, as_trial: AsTrial) -> None:
        """Makes what `train` makes before its first step, as this trial would, and raises what that would raise then. Nothing is
        trained or written."""
        self._as_trial = as_trial
        with self.at_work():
            self._build(self.open(), None)
            with guard.symmetric():
                observers_of(self.config)

    def _go_on_with(self, comm: Any) -> None:
        """The rest of the run is that of these ranks; the others were lost."""
        files = self._files() if self._session is None or self._session.files is None else self._session.files
        self.comm, self._session, self._files, self.process.went_on = comm, None, lambda: files, True
        self.config = changed(self.config, mesh={"dp": 0})

    def _train(self, folder: RunFolder, resume: str | None, overwrite: bool, profile: bool, observers: Sequence[Observer],
               change: Sequence[str], strict: bool) -> Trained:
        with ExitStack() as cleanup:
            session = self.open()
            found = None
            if on_first(session.control, lambda: resuming.continues(folder, resume)):
                self._take(session, folder, resume, overwrite, cleanup)
                found = self._find(session, folder, change, strict)
            job = self._build(session, found)
            beside = self._prediction(session)
            forecast = predict_memory(self.config, session, job) if self._as_trial is None else Forecast([])
            job.trainer.notes.insert(0, session.summary(make_model(self.config).count_parameters(), job.plan))
            job.trainer.notes += session.notes + session.told_once([environment.slow_kernels()])
            with guard.symmetric():
                asked = [*observers_of(self.config), *observers, *beside]
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
                asked.append(Profile(job.timeline, session.mesh.channel(session.mesh.axes, "clocks"), folder,
                                     job.policy.layout.device))
            return self._fit(session, job, folder, forecast, asked, about, kept)

    def _prediction(self, session: Session) -> list[Observer]:
        """What puts the predicted step beside the measured one, where log.machine asks for it. It communicates."""
        if not self.config.log.machine:
            return []
        with guard.symmetric():
            machine = machine_of(self.config, self.comm.size)
        from mpitrain.plan.planner.beside import Beside, predicted  # few runs are compared with a plan
        assert machine is not None, "it is named"
        return [Beside(on_first(session.control, lambda: predicted(self.config, machine, self.comm.size, session.inputs,
                                                                   session.threads)))]

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
            alike = self._as_trial is not None and session.control.size > 1
            looks = alike and can_leave_out(config)           # at each step's norm, and with it at all ranks' losses
            asked = changed(config, train={"on_nan": "skip"}) if looks else config
            job = build(asked, session.inputs, session.mesh, stages=stages, quiet=self.quiet)
            if looks:
                job.trainer.bad_steps.most_in_a_row = 1
            if self._as_trial is not None:
                job.trainer.pauses = evaluated_where(self._as_trial.pauses(job.plan), job.plan)
            if config.distil.teaches:
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
            late = [Stragglers([place.host for place in session.places])] if self.comm.size > 1 else []
            trainer.observers += [MetricsFile(folder.metrics), *late]
        trainer.observers += [memory, *asked]
        saver = job.keep_in(folder, {"seed": config.run.seed, "model": {"name": config.model.name, **config.model.arguments},
                                     "mesh": about["mesh"], **kept})
        about |= {"id": kept["id"], "changes": kept["changes"], **({"numerics": job.numerics} if job.numerics else {}),
                  **({"limits": self.limits} if self.limits else {})}
        if self._survivors is not None:
            about |= self._survivors.begin(session, job, saver)
        tables = dict[str, Any]()                             # of the run's last evaluation

        def begin() -> None:
            written = folder.about()
            about.update({key: value for key, value in written.items() if key == "restarts"})      # of `supervise`
            if trainer.over or trainer.update.step == job.plan.steps:         # nothing is evaluated again
                values = written.get("metrics") or {}
                tables.update({key: value for key, value in values.items() if isinstance(value, list | dict)})
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
        began, metrics = time.time(), trainer.fit()
        if trainer.evaluator is not None and trainer.evaluator.tables:
            tables = named_tables(trainer.evaluator.tables, session.inputs)
        paused, steps = trainer.pauses.paused, trainer.update.step
        hashes, ended = {} if paused else job.state.hashes(), trainer.over and not paused
        record = about | hashes | trainer.bad_steps.record() | {
            "status": "paused" if paused else "done", "steps": steps, "seconds": round(time.time() - began, 3),
            **({"ended": {"step": steps, "reason": trainer.over}} if ended else {}),
            "metrics": plain_values(metrics) | tables, "memory": as_json(forecast, memory.uses), "checkpoints": saver.times()}

        def end() -> None:
            refused = add_data(record, trainer.found)
            folder.write_json(folder.run_json, record)
            if refused:
                raise ConfigError(f"{refused[0]}; the run is done, and run.json has all but that", file=folder.run_json)
        on_first(control, end)
        return Trained(steps, metrics, hashes, paused)
