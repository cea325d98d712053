"""Model, data, mesh and optimizer become a trainer. This is the Python interface; `build` calls it for a configuration.

The order is the composition rule, and nothing later undoes anything earlier:

    describe the model (shapes only) -> cut layers -> cut into stages -> allocate -> initialise -> broadcast -> reducer
        -> pipeline -> trainer
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain import nn, optim
from mpitrain.backend import select_device
from mpitrain.checkpoint import store
from mpitrain.checkpoint.kinds import Values
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.parts import Piece
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.checkpoint.saver import Saver
from mpitrain.checkpoint.state import State
from mpitrain.comm.job import guard
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.config import Config
from mpitrain.config.rules import name_of
from mpitrain.data import Loader
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.optim.schedule import Adaptive
from mpitrain.parallel.connect import ParallelContext, connect
from mpitrain.parallel.gradients.replicas import synchronise_batch_norm
from mpitrain.parallel.gradients.timeline import Timeline
from mpitrain.parallel.gradients.tuning import Tuning
from mpitrain.parallel.pipeline.inference import Inference
from mpitrain.parallel.pipeline.runner import Pipeline
from mpitrain.parallel.policies.choose import change, choose
from mpitrain.parallel.policies.policy import Policy, Setup
from mpitrain.placement.bytes import memory_text
from mpitrain.placement.place import place
from mpitrain.train.build import precision
from mpitrain.train.build.evaluation import judges, make_evaluator, refuse_without_evaluations
from mpitrain.train.build.extension import Assembled, Extension, take
from mpitrain.train.build.extensions import extensions_of, observe
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.measured_cut import MeasuredCut
from mpitrain.train.build.settings import make_plan, make_tuning
from mpitrain.train.build.trial import try_replicas, try_samples
from mpitrain.train.build.validate import refuse_cuts, refuse_parts, validate
from mpitrain.train.intervals import Plan
from mpitrain.train.observers.reached import Reached
from mpitrain.train.observers.record import Console
from mpitrain.train.observers.tune import Tune
from mpitrain.train.trainer import Trainer

if TYPE_CHECKING:
    from mpitrain.metrics import Metric


@dataclass
class Job:
    """A run that is ready to go. No file has been written yet.

        job = assemble(...)
        job.keep_in(folder, about)           # checkpoints, where wanted
        job.trainer.observers.append(...)    # metrics, and further observers of steps
        job.resume(found)                    # from a checkpoint, if there is one
        metrics = job.fit()
    """

    trainer: Trainer
    state: State
    plan: Plan
    config: Config
    channel: Channel
    context: ParallelContext                 # this rank's part of the model
    policy: Policy                           # storage of its parameters over ranks
    tuning: Tuning                           # settings chosen by measurement: its `choices`
    timeline: Timeline                       # times of this rank's steps
    numerics: dict[str, str] | None = None   # fingerprint of the machine; with reproducible = "layout"
    parts: Sequence[Extension] = ()          # what sections of the configuration add

    def fit(self) -> dict[str, float]:
        """Trains to the end; the metrics of the last evaluation. It communicates."""
        if self.config.train.on_nan == "rewind" and self.trainer.saver is None:
            with guard.symmetric():
                raise ConfigError('train.on_nan = "rewind" goes back to checkpoints: call keep_in before fit, or set "skip"')
        return self.trainer.fit()

    def keep_in(self, folder: RunFolder, about: dict[str, Any]) -> Saver:
        """Writes checkpoints to an open run folder; `about` is kept in them. Returns their writer."""
        self.trainer.folder = folder.path
        if self.numerics is not None:
            about = {**about, "numerics": self.numerics}

        checkpoint, trainer = self.config.checkpoint, self.trainer

        def take(step: int) -> list[Piece]:
            self.state.refuse_nonfinite(step)
            return self.state.pieces()

        def prune(meta: Mapping[str, Any], written: Path) -> None:
            best = meta["best"][1] if meta["best"] and checkpoint.best else None
            store.prune(folder.checkpoints, checkpoint.keep, best=best, verified=written)
        trainer.saver = saver = Saver(folder.checkpoints, self.channel, take, asynchronous=checkpoint.asynchronous,
                                      goes_on=checkpoint.on_error == "go_on", published=prune, fence=folder.refuse_lost,
                                      tell=trainer.tell, about=lambda meta: {**about, **meta, "choices": self.tuning.choices})
        if self.config.train.on_nan == "rewind":
            trainer.bad_steps.go_back = lambda: self._go_back(folder)
        return saver

    def _go_back(self, folder: RunFolder) -> int:
        """Takes the state of the newest whole checkpoint, while the run stays at its step; the former's step. It communicates."""
        found = store.latest(folder.checkpoints, self.channel, store.REWIND, warn=self.trainer.tell)
        with guard.symmetric():
            if found.step > self.trainer.update.step:
                raise CheckpointError(f"expected a checkpoint of an earlier step than {self.trainer.update.step}; move it out of "
                                      "this folder", file=found.folder)
            self._restore(found)
        return found.step

    def _restore(self, found: Checkpoint, *, resumed: bool = False) -> None:
        if not any(part.restore(self.state, found) for part in self.parts):
            from mpitrain.checkpoint.sites import refuse_apart  # a run that begins needs none of it
            refuse_apart(found)
            self.state.restore(found)
            self.context.start_alike(self.state.arrays())
        for part in self.parts:
            part.restored(found, resumed=resumed)
        rate, kept = self.trainer.update.rate, found.meta.get("rate")
        if isinstance(rate, Adaptive) and kept is not None:
            take("its learning rate", rate.restore, kept, found)

    def load(self, found: Checkpoint) -> None:
        """Starts from another run's parameters and buffers. It communicates."""
        new = None
        if self.config.lora.rank:
            from mpitrain.train.build.adapters import is_new
            new = is_new(self.config)
        self.state.load_parameters(found, new)
        self.context.start_alike(self.state.arrays())

    def resume(self, found: Checkpoint) -> None:
        """Continues with the step after the checkpoint's; it communicates.

        Raises CheckpointError for another model's checkpoint, and ConfigError if the run would be over before it continues.
        """
        if found.step > self.plan.steps:
            raise ConfigError(f"the checkpoint is at step {found.step}, beyond the {self.plan.steps} steps of this run; "
                              "raise train.steps or train.epochs", file=found.folder)
        if "privacy" in found.meta and self.policy.private is None:
            from mpitrain.train.build.privacy import refuse_without
            refuse_without()
        self._restore(found, resumed=True)
        self.trainer.update.step = found.step
        self.trainer.bad_steps.resume(found.meta)
        chosen = found.meta.get("choices") or {}
        self.tuning.restore(chosen)
        best = found.meta.get("best") if found.meta.get("best_metric", "loss") == self.trainer.judge[0] else None
        self.trainer.best = (float(best[0]), int(best[1])) if best else None
        if self.trainer.patience is not None:
            take("the state of its early stopping", self.trainer.patience.restore, found.meta.get("stop"), found)
        metrics = found.meta.get("metrics") or {}
        self.trainer.metrics = {name: math.nan if value is None else value for name, value in metrics.items()}
        self.trainer.evaluated = self.trainer.evaluator is None or found.meta.get("evaluated") is not False
        from mpitrain.train.machine import fingerprint
        said = fingerprint.changes(found.meta.get("numerics"), self.numerics)
        if not said and self.numerics is None:
            said = change(chosen.get("exchange"), self.tuning.choices.get("exchange"))
        self.trainer.notes += [said] if said else []
        self.trainer.notes += [line for kind in self.state.kept if isinstance(kind, Values) for line in kind.said]


def assemble(model: nn.Module, inputs: Inputs, mesh: Mesh, *, loss: Any, optimizer: Callable[[nn.FlatStorage], optim.Optimizer],
             rate: Callable[[int], Callable[[int], float]] | None = None, config: Config, quiet: bool = False,
             metrics: Sequence[Metric] = ()) -> Job:
    """Puts a run together, the same on every rank: all ranks call it, with the same arguments; it communicates.

    `rate(steps)` gives the learning rate as a function of the step (default: the optimizer's own, always). `config`'s keys for
    the model, the data, the loss, the metrics, the optimizer and the rate are not read: they are given. Misfits raise here,
    before the first exchange of gradients and before anything is written. The function is longer than a screen because its order
    is the composition rule, and a reader should see it in one piece.
    """
    parts = extensions_of(config, mesh, inputs, model, loss, optimizer)
    drawn: Any = inputs.train_rows
    for part in parts:
        config, drawn = part.configured(config), part.drawn(drawn)
    m, t, comm = config.mesh, config.train, config.comm
    valid = validate(config, mesh, model, optimizer, rate, drawn)
    for part in parts:
        part.validated(valid)
    n_micro, sampler = valid.n_micro, valid.sampler
    anywhere = t.reproducible == "layout"
    if anywhere:
        from mpitrain.train.machine import fingerprint
        fingerprint.refuse_threads()
    control = mesh.channel(mesh.axes, "control")
    plan = make_plan(config, sampler)
    device = select_device(t.device, mesh.before + local_rank(control))
    if device.name == "cpu":
        precision.refuse(t.precision)
    numerics = None
    if anywhere:
        mine = fingerprint.numerics()
        fingerprint.agree(mine, socket.gethostname(), control)
        numerics = {"micro_batches": str(n_micro), **mine}
    inputs.fit(control)
    stages = m.stages if m.stages != "time" else MeasuredCut(
        inputs, control, device, rows=-(-t.batch_size // n_micro), parts=mesh.size("pp") * m.chunks, seed=config.run.seed,
        precision=t.precision)
    placement = place(model, mesh, m, t, comm, stages=stages)
    refuse_parts(valid.tried, placement)
    refuse_cuts(config, placement)
    context = connect(placement, mesh, control, shared=comm.algorithm == "auto" and device.name == "cpu")
    if isinstance(stages, MeasuredCut):
        context.choices |= stages.choices
    stage, loss = context.stage, context.loss(loss)
    context.agree_on_schedule(valid.schedule, name_of(m.schedule), n_micro)
    policy = choose(Setup(config, context, device, algorithm=valid.algorithm, optimizer=optimizer))
    policy.initialise()
    feed = context.feed(policy.layout, tokens=inputs.tokens)
    inference = Inference(stage, feed, context.neighbours)
    sampled = try_samples(inference, loss, inputs, placement, context.output_shape, control)
    n_classes, ignore, tried, _ = sampled

    if config.optimizer.offload == "none":
        stepper = optimizer(policy.storage)
    else:
        from mpitrain.train.build.offload import files_folder, offloaded
        stepper = offloaded(optimizer, config.optimizer.offload, files_folder(config), policy.storage, device, control)
    for part in parts:
        stepper = part.optimizer(stepper, policy, control, plan.steps)
    state = State(stage.model, stepper, inputs.transforms, whole=model, mesh=mesh, control=control, policy=policy)
    state.kept += [kind for part in parts for kind in part.kinds()]
    synchronise_batch_norm(stage.model, context.replicas)
    context.start_alike(state.arrays())
    policy.refresh()
    tried = [*tried, *try_replicas(model, inference, inputs, mesh, control)]

    first, last = placement.own_micro_batches
    new_loader, new_pipeline = Loader, Pipeline
    for part in parts:
        part.open(policy, mesh, control, range(first, last), plan.steps)
        new_loader, new_pipeline = part.loader(new_loader), part.pipeline(new_pipeline)
    policy.open(stepper, rate(plan.steps) if rate else lambda step: stepper.lr)
    reducer, timeline = policy.reducer, policy.reducer.timeline
    rows = inputs.as_stored() if device.name == "gpu" and placement.part is None else inputs
    loader = new_loader(rows.training, sampler, n_micro, first, last, transforms=rows.transforms, augment=rows.augment,
                    n_classes=n_classes, ignore=ignore, dtype=policy.layout.dtype, tasks=inputs.tasks,
                    workers=config.data.workers, span=timeline.span)
    mesh.progress.landed = timeline.look
    pipeline = new_pipeline(stage, loss, control, reducer, feed, n_micro=n_micro, seed=config.run.seed, schedule=valid.schedule,
                        after_forward=policy.statistics.after_forward, neighbours=context.neighbours, counts=context.counts,
                        span=timeline.span, goes_on=policy.goes_on, site=(mesh.coordinate("site"), mesh.n_sites))
    pipeline.scale = None if policy.loss_scale is None else policy.loss_scale.scale
    evaluator = make_evaluator(inference, loss, inputs, context, metrics, sampled, cuts_parameters=policy.cuts_parameters,
                               dtype=policy.layout.dtype, span=timeline.span, rows=rows)
    if evaluator is None:
        refuse_without_evaluations(config, policy.rate)
    tuning = make_tuning(comm, reducer, control, mesh)
    trainer = Trainer(pipeline=pipeline, update=policy, loader=loader, evaluator=evaluator, channel=control, plan=plan,
                      span=timeline.span)
    if device.name == "gpu":
        from mpitrain.train.build.device import prepare
        prepare(trainer, config, device, policy)
    trainer.judge, trainer.patience = judges(config, metrics, loss.kind)
    trainer.observers += [Tune(tuning), Reached(pipeline, control),
                          *([] if quiet or control.rank else [Console(config.log.progress_s)])]
    run = Assembled(config, trainer, state, policy, control, model)
    observe(run)
    trainer.notes += [*policy.notes, *comm.idle, *context.notes, *tried]
    for part in parts:
        part.join(run)
    if comm.sharding != "none" and mesh.n_places > 1:
        trainer.notes.append(memory_text(control.gather_objects(policy.measured()), comm.sharding, per_node=policy.per_node))
    tuning.choices |= policy.choices | context.choices
    return Job(trainer, state, plan, config, control, context, policy, tuning, timeline, numerics, parts)


def local_rank(channel: Channel) -> int:
    """This rank's number among those on its host."""
    hosts = channel.gather_objects(socket.gethostname())
    return hosts[:channel.rank].count(hosts[channel.rank])
