"""The verbs `train` and `evaluate`: from a configuration to an exit status, on every rank."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.backend import keep_freed_memory, select_device
from mpitrain.checkpoint import store
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.checkpoint.state import State
from mpitrain.comm.job import guard
from mpitrain.comm.job.signals import listen
from mpitrain.comm.job.start import World, launched_rank, start
from mpitrain.comm.job.together import on_first
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.config import Config, to_toml
from mpitrain.errors import MpitrainError, OutputError, UsageError
from mpitrain.parallel.connect import connect
from mpitrain.parallel.pipeline.inference import Inference
from mpitrain.parallel.policies.choose import choose_to_evaluate
from mpitrain.parallel.policies.policy import Setup
from mpitrain.placement.bytes import Forecast, Use
from mpitrain.placement.place import place
from mpitrain.plan.memory import forecast_of
from mpitrain.plan.memory_lines import as_json, report_lines
from mpitrain.schedules.grid import Grid
from mpitrain.train.build import measured_cut
from mpitrain.train.build.assembly import Job, local_rank
from mpitrain.train.build.from_config import build, checkpoint_folder, make_loss, make_model
from mpitrain.train.build.inputs import Inputs, describe_files, open_inputs
from mpitrain.train.build.trial import try_one_sample
from mpitrain.train.evaluate import Evaluator
from mpitrain.train.machine import environment, threads
from mpitrain.train.machine.threads import Place
from mpitrain.train.observers.log import plain_values
from mpitrain.train.observers.memory import Memory
from mpitrain.train.observers.observer import Observer, own_observers
from mpitrain.train.observers.profile import Profile
from mpitrain.train.observers.record import MetricsFile
from mpitrain.train.observers.tensorboard import TensorBoard


@dataclass
class Session:
    """MPI started, files described, threads pinned: what every verb that runs on ranks begins with."""

    world: World
    mesh: Mesh
    control: Channel
    inputs: Inputs
    threads: int
    places: list[Place]
    notes: list[str]                         # what is slower here than it need be
    cleanup: ExitStack = field(default_factory=ExitStack)


def open_session(config: Config, cleanup: ExitStack) -> Session:
    """Files are examined before MPI starts (their parser is a child process, and nothing forks afterwards), by one rank."""
    keep_freed_memory(config.train.cached_mb * 2**20 or None)
    np.seterr(all="ignore")                  # NaN and Inf are looked for, and named, where they matter
    look = before_mpi(lambda: look_at_files(config))
    world = start()
    with guard.symmetric():
        mesh = Mesh(world.comm, pp=config.mesh.pp, dp=config.mesh.dp, ep=config.mesh.ep, cp=config.mesh.cp,
                     tp=config.mesh.tp)
    cleanup.push(lambda kind, error, trace: mesh.close() if kind is None else None)     # collective: not where a rank failed
    control = mesh.channel(mesh.axes, "start-up")
    places = [Place(*found) for found in control.gather_objects(threads.place())]
    node = threads.on_node(places, world.rank)
    one = config.train.reproducible == "layout" or config.train.precision == "bfloat16"
    pinned = threads.pin(1 if one else config.train.threads, node)
    notes = told_once(control.gather_objects([node[0].host, [threads.crowded(pinned, node), environment.slow_blas()]]))
    control.agree(to_toml(config), "the configuration")
    installed = environment.versions()
    control.agree({name: installed.get(name) for name in ("mpitrain", "numpy", "numba", "h5py")}, "package versions")
    description = on_first(control, look)
    with guard.symmetric():
        inputs = open_inputs(description, validation=config.data.validation, seed=config.run.seed,
                             block=config.model.arguments.get("block"), stride=config.data.stride,
                             transform=config.data.transform, augment=config.data.augment, folder=config.folder)
    return Session(world, mesh, control, inputs, pinned, places, notes)


def look_at_files(config: Config) -> dict[str, Any]:
    """What the data files hold. On rank 0, which will write files with h5py."""
    platform.processor()                     # h5py asks for it, and Python asks a child process: once, and now
    d = config.data
    return describe_files(d.path, d.validation, config.folder, d.x, d.y)


def told_once(everyone: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Each text that some ranks have to say, once; with the first one's host where they are on several."""
    several = len({host for host, _ in everyone}) > 1
    texts: dict[str, str] = {}
    for host, said in everyone:
        for text in filter(None, said):
            texts.setdefault(text, f"{text} ({host})" if several and host not in text else text)
    return list(texts.values())


def compiled_or_not(session: Session) -> list[str]:
    """Why compiled code is missing, where it is. Asked once a sample has been through the model. It communicates."""
    host = session.places[session.world.rank].host
    return told_once(session.control.gather_objects([host, [environment.slow_kernels()]]))


def before_mpi(action: Callable[[], Any]) -> Callable[[], Any]:
    """Runs `action` now, on the rank that will be 0; the answer gives its value, or raises its error, when called later."""
    if launched_rank()[0] != 0:
        return lambda: None
    try:
        value = action()
    except MpitrainError as error:
        kept = error

        def fail() -> Any:
            raise kept
        return fail
    return lambda: value


def train(config: Config, *, resume: str | None = None, overwrite: bool = False, quiet: bool = False,
          profile: bool = False) -> int:
    """Trains as `config` says, in its run folder. `resume` is "latest" (there must be a checkpoint) or "auto"."""
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite deletes it; give one of them")
    with ExitStack() as cleanup:
        stop = listen()
        session = open_session(config, cleanup)
        folder = RunFolder(config.run.out)
        stages = on_first(session.control, lambda: config.mesh.stages if not continues(folder, resume) else
                          measured_cut.kept_in(folder.checkpoints, config.mesh.stages, n_virtual(config)))
        with guard.symmetric():
            job = build(config, session.inputs, session.mesh, stages=stages, quiet=quiet)
        job.trainer.stop = stop
        forecast = predict_memory(config, session, job)
        job.trainer.notes += session.notes + compiled_or_not(session)
        if config.model.init_from and not on_first(session.control, lambda: continues(folder, resume)):
            load_from(config, job, session.control)
        with guard.symmetric():
            asked = observers_of(config)
        continued = on_first(session.control, lambda: open_folder(folder, resume, overwrite))
        if session.world.rank == 0:
            cleanup.callback(folder.close)
        guard.set_run_folder(folder.path)
        if continued:
            found = store.latest(folder.checkpoints, session.control, store.RESUME)
            with guard.symmetric():
                job.resume(found)
        on_first(session.control, lambda: begin_folder(folder, config, job.trainer.update.step))
        watch = Memory(job, lambda uses: report_lines(forecast, uses))
        job.trainer.observers += [watch, *([MetricsFile(folder.metrics)] if session.world.rank == 0 else []), *asked]
        if profile:
            job.trainer.observers.append(Profile(job.timeline, session.mesh.channel(session.mesh.axes, "clocks"), folder))
        job.keep_in(folder, {"seed": config.run.seed, "model": {"name": config.model.name, **config.model.arguments}})
        about = describe_run(config, session) | ({"numerics": job.numerics} if job.numerics else {})
        on_first(session.control, lambda: folder.write_json(folder.run_json, about | {
            "status": "running", "memory": as_json(forecast, [])}))
        began = time.time()
        metrics = job.trainer.fit()
        if job.state.is_cut:
            job.held.copies.agree(job.state.own_sha256(), "the final parameters of their part")
        hashes = job.state.hashes()
        session.control.agree(hashes, "the final parameters")
        record = about | hashes | job.trainer.found | {
            "status": "done", "steps": job.plan.steps, "seconds": round(time.time() - began, 3), "metrics": plain_values(metrics),
            "memory": as_json(forecast, watch.uses)}
        on_first(session.control, lambda: folder.write_json(folder.run_json, record))
    return 0


def predict_memory(config: Config, session: Session, job: Job) -> Forecast:
    """What the ranks will need, of rank 0, which runs a few rows through a model whose parameters take no memory."""
    bounds = job.held.stage.bounds

    def predict() -> Any:
        placement = place(make_model(config), Grid(session.mesh.lengths), config.mesh, config.train, config.comm,
                                stages=[b - a for a, b in pairwise(bounds)])
        found = forecast_of(config, placement, session.inputs)
        return [list(map(list, found.stages)), found.why]

    stages, why = on_first(session.control, predict)
    return Forecast([Use(*use) for use in stages], why)


def n_virtual(config: Config) -> int:
    """Into how many parts the model is cut."""
    return config.mesh.pp * config.mesh.chunks


def open_folder(folder: RunFolder, resume: str | None, overwrite: bool) -> bool:
    """Takes the run folder; whether there is a run in it to continue."""
    continued = continues(folder, resume)
    if resume == "latest" and not folder.path.exists():
        raise OutputError("there is no run to resume in this folder; start it without --resume", file=folder.path)
    folder.open(resume=resume is not None, overwrite=overwrite)
    return continued


def continues(folder: RunFolder, resume: str | None) -> bool:
    """Whether there is a run to continue, and that is wanted."""
    return resume is not None and (resume != "auto" or bool(store.candidates(folder.checkpoints)))


def load_from(config: Config, job: Job, channel: Channel) -> None:
    """The parameters that model.init_from names; before --overwrite deletes anything, since it may be that very run."""
    source = checkpoint_folder(config.folder / config.model.init_from)
    found = store.latest(source, channel, store.START)
    with guard.symmetric():
        job.load(found)


def begin_folder(folder: RunFolder, config: Config, step: int) -> None:
    """config.toml as it is run, and metrics.jsonl cut back to the step the run goes on from."""
    folder.write_text(folder.config, to_toml(config))
    folder.truncate_metrics(step)


def observers_of(config: Config) -> list[Observer]:
    """Those that [log] asks for. Raises ConfigError, alike on all ranks, where one cannot be had."""
    board: list[Observer] = [TensorBoard()] if config.log.tensorboard else []
    return board + own_observers(config.log.observers, config.folder)


def describe_run(config: Config, session: Session) -> dict[str, Any]:
    from mpi4py import MPI
    mesh = {axis: session.mesh.size(axis) for axis in session.mesh.axes}
    return {"name": config.run.name, "seed": config.run.seed} | environment.describe(
        mpi_library=MPI.Get_library_version(), hosts=[place.host for place in session.places], mesh=mesh,
        threads=session.threads, cores=[len(place.cores) for place in session.places], device=config.train.device)


def evaluate(config: Config, source: Path, *, quiet: bool = False) -> int:
    """The metrics of a run's newest checkpoint on its validation data, printed as one JSON line by rank 0."""
    with ExitStack() as cleanup:
        session = open_session(config, cleanup)
        found = store.latest(source / "checkpoints", session.control, store.EVALUATE)
        number = local_rank(session.control)
        with guard.symmetric():
            device = select_device(config.train.device, number)
            model = make_model(config)
            stages = measured_cut.kept(config.mesh.stages, n_virtual(config), found.meta.get("choices"))
            placement = place(model, session.mesh, config.mesh, config.train, config.comm, stages=stages)
            held = connect(placement, session.mesh, session.control, shared=device.name == "cpu")
            loss = held.loss(make_loss(config, session.inputs.tokens))
            policy = choose_to_evaluate(Setup(config, held, device))
            policy.initialise()
            State(held.stage.model, None, session.inputs.transforms, whole=model, policy=policy).restore(found)
            feed = held.feed(device, policy.layout.dtype, tokens=session.inputs.tokens)
            inference = Inference(held.stage, feed, held.neighbours)
            read, n_chunks = session.inputs.chunks(try_one_sample(inference, loss, session.inputs, held))
            if not n_chunks:
                raise UsageError("this run has no validation data; give some: data.validation=PATH")
        metrics = Evaluator(inference, loss, read, n_chunks, session.control, place=session.mesh.place,
                            n_places=session.mesh.n_places, counts=held.counts, classes=held.classes,
                            in_step=policy.cuts_parameters or placement.in_step).run()
        if session.world.rank == 0:
            print(json.dumps({"step": found.step, "split": "validation", **plain_values(metrics)}), flush=True)
    return 0


