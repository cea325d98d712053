"""Model, data, mesh and optimizer become a trainer. This is the Python interface; `build` calls it for a configuration.

The order is the composition rule, and nothing later undoes anything earlier:

    describe the model (shapes only) -> cut layers -> cut into stages -> allocate -> initialise -> broadcast -> reducer
        -> pipeline -> trainer
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpitrain import nn, optim
from mpitrain.backend import select_device
from mpitrain.checkpoint import store
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.checkpoint.state import State
from mpitrain.comm.job.together import everywhere, on_first
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.progress import threads_may_call_mpi
from mpitrain.config import CommConfig, MeshConfig, TrainConfig
from mpitrain.data import Dataset, Loader, Sampler, scan_labels
from mpitrain.errors import ConfigError, nearest
from mpitrain.parallel.connect import Held, connect
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.sync_batch_norm import synchronise_batch_norm
from mpitrain.parallel.gradients.timeline import Timeline
from mpitrain.parallel.gradients.tuning import POLICIES, Tuning
from mpitrain.parallel.pipeline.inference import Inference
from mpitrain.parallel.pipeline.runner import Pipeline
from mpitrain.parallel.policies.choose import change, choose
from mpitrain.parallel.policies.policy import Policy, Setup
from mpitrain.placement.place import micro_batches, place
from mpitrain.train.build import precision, reproducible
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.build.measured_cut import MeasuredCut
from mpitrain.train.build.offload import offloaded, refuse_offload
from mpitrain.train.build.refusals import refuse_cut, refuse_one_copy, refuse_uneven_experts, refuse_with_experts
from mpitrain.train.build.sharding import memory_text, refuse_sharding
from mpitrain.train.build.trial import try_one_sample
from mpitrain.train.evaluate import Evaluator
from mpitrain.train.intervals import Plan
from mpitrain.train.machine import fingerprint
from mpitrain.train.observers.record import Console
from mpitrain.train.observers.tuning import Tune
from mpitrain.train.trainer import Trainer


@dataclass
class Options:
    """How to train, beside model, data, loss and optimizer. Counts are in steps unless said otherwise."""

    steps: int = 0                           # or epochs, not both
    epochs: int = 0
    batch_size: int = 64                     # global
    micro_batches: int = 0                   # of the global batch; 0: one per data-parallel rank
    seed: int = 0
    reproducible: str = "run"                # or "layout": the same bits on any number of ranks
    precision: str = "float32"               # or "float64"; "bfloat16": of the operands of matrix products
    device: str = "cpu"
    clip_norm: float = 0.0
    eval_every: int = 0                      # 0: each epoch
    log_every: int = 10
    checkpoint_every: int = 0                # 0: at the end only
    keep: int = 2
    keep_best: bool = False
    drop_last: bool = True
    workers: int = 1
    algorithm: Any = "auto"                  # of the gradients' all-reduce: a name, or a function of your own
    bucket_bytes: int = 4 << 20
    wire: str = "float32"                    # what messages carry of a float32 gradient
    node_shared: bool = False
    sharding: str = "none"                   # "optimizer", "gradients", "parameters": what is cut over data-parallel ranks
    offload: str = "none"                    # of optimizer state: to the "host" of a GPU, or to a "file"
    offload_folder: str = "."                # where files lie, which nobody sees
    tune_buckets: bool = False               # cut buckets anew after the first steps, where measured ready times say
    progress: str = "poll"                   # who moves messages: "poll", "thread", or "auto": what is faster
    schedule: Any = "1f1b"                   # of the pipeline's stages: a name, or a generator function of your own
    chunks: int = 1                          # of the model on each stage
    stages: Any = "blocks"                   # how the model is cut: "blocks", "time", or each stage's number of blocks
    plan: Mapping[str, str] | None = None    # how layers are cut over mesh.tp ranks; default: the model's own
    sequence: bool = False                   # whether what lies between them is cut along the sequence
    quiet: bool = False

    @property
    def sections(self) -> tuple[MeshConfig, TrainConfig, CommConfig]:
        """What `place` takes of them."""
        stages = self.stages if isinstance(self.stages, (str, tuple)) else tuple(self.stages)
        return (MeshConfig(chunks=self.chunks, stages=stages, plan=dict(self.plan or {}), sequence=self.sequence),
                TrainConfig(batch_size=self.batch_size, micro_batches=self.micro_batches, reproducible=self.reproducible,
                            precision=self.precision, device=self.device),
                CommConfig(bucket_mb=self.bucket_bytes / 2**20, node_shared=self.node_shared, sharding=self.sharding))


@dataclass
class Job:
    """A run that is ready to go. Nothing has been written anywhere yet.

        job = assemble(...)
        job.keep_in(folder, about)           # checkpoints, where wanted
        job.trainer.observers.append(...)    # metrics, and whatever else is to be known of steps
        job.resume(found)                    # from a checkpoint, where there is one
        metrics = job.fit()
    """

    trainer: Trainer
    state: State
    plan: Plan
    options: Options
    channel: Channel
    held: Held                               # what this rank has of the model
    policy: Policy                           # how ranks keep its parameters
    tuning: Tuning                           # what is chosen, and what was: its `choices`
    timeline: Timeline                       # of this rank's steps
    numerics: dict[str, str] | None = None   # what the bits depend on; with reproducible = "layout"

    def fit(self) -> dict[str, float]:
        """Trains to the end; the metrics of the last evaluation. It communicates."""
        return self.trainer.fit()

    def keep_in(self, folder: RunFolder, about: dict[str, Any]) -> None:
        """Writes checkpoints to an open run folder; `about` is kept in them."""
        self.trainer.folder = folder.path
        if self.numerics is not None:
            about = {**about, "numerics": self.numerics}

        def save(meta: dict[str, Any]) -> None:
            everywhere(self.channel, lambda: self.state.refuse_nonfinite(meta["step"]))
            pieces = self.state.pieces()
            kept = {**about, **meta, "choices": self.tuning.choices}
            written = store.save(folder.checkpoints, meta["step"], pieces, kept, self.channel)
            if self.channel.rank == 0:
                best = meta["best"][1] if meta["best"] and self.options.keep_best else None
                store.prune(folder.checkpoints, self.options.keep, best=best, verified=written)
        self.trainer.save = save

    def load(self, found: Checkpoint) -> None:
        """Starts from another run's parameters and buffers. It communicates."""
        self.state.load_parameters(found)
        self.held.start_alike(self.state.arrays())

    def resume(self, found: Checkpoint) -> None:
        """Goes on with the step after the checkpoint's; it communicates.

        Raises CheckpointError where it is another model's, and ConfigError where the run would be over before it goes on.
        """
        if found.step > self.plan.steps:
            raise ConfigError(f"the checkpoint is at step {found.step}, beyond the {self.plan.steps} steps of this run; "
                              "raise train.steps or train.epochs", file=found.folder)
        self.state.restore(found)
        self.held.start_alike(self.state.arrays())
        self.trainer.update.step = found.step
        chosen = found.meta.get("choices") or {}
        self.tuning.restore(chosen)
        best = found.meta.get("best")
        self.trainer.best = (float(best[0]), int(best[1])) if best else None
        self.trainer.metrics = dict(found.meta.get("metrics") or {})
        self.trainer.evaluated = self.trainer.evaluator is None or found.meta.get("evaluated") is not False
        said = fingerprint.changes(found.meta.get("numerics"), self.numerics)
        if not said and self.numerics is None:
            said = change(chosen.get("exchange"), self.tuning.choices.get("exchange"))
        self.trainer.notes += [said] if said else []


def assemble(model: nn.Module, inputs: Inputs, mesh: Mesh, *, loss: Any, optimizer: Callable[[nn.FlatStorage], optim.Optimizer],
             rate: Callable[[int], Callable[[int], float]] | None = None, options: Options) -> Job:
    """Puts a run together, the same on every rank: all ranks call it, with the same arguments; it communicates.

    `rate(steps)` gives the learning rate as a function of the step (default: the optimizer's own, always). What does not fit
    raises here, before the first exchange of gradients and before anything is written.
    """
    o = options
    refuse_one_copy(o)
    refuse_cut(o, mesh)
    refuse_with_experts(o, mesh)
    anywhere = reproducible.is_asked_for(o.reproducible)
    if anywhere:
        reproducible.refuse_options(o.micro_batches, o.algorithm, o.wire)
        reproducible.refuse_mesh(mesh.size)
        reproducible.refuse_threads()
    control = mesh.channel(mesh.axes, "control")
    n_micro = micro_batches(mesh, *o.sections[:2])
    sampler = Sampler(inputs.train_rows, o.batch_size, seed=o.seed, drop_last=o.drop_last)
    fewest = sampler.size(sampler.steps_per_epoch - 1)
    refuse_uneven_experts(mesh, n_micro, fewest)
    plan = make_plan(o, sampler)
    device = select_device(o.device, local_rank(control))
    precision.refuse(o.precision, device)
    refuse_offload(o, device)
    if anywhere:
        reproducible.refuse_model(model, device)
    numerics = reproducible.agree_on_numerics(control, n_micro) if anywhere else None
    inputs.fit(control)
    stages = o.stages if o.stages != "time" else MeasuredCut(
        inputs, control, device, rows=-(-o.batch_size // n_micro), parts=mesh.size("pp") * o.chunks, seed=o.seed,
        precision=o.precision)
    placement = place(model, mesh, *o.sections, stages=stages)
    held = connect(placement, mesh, control, shared=o.algorithm == "auto" and device.name == "cpu")
    if isinstance(stages, MeasuredCut):
        held.choices |= stages.choices
    stage, loss = held.stage, held.loss(loss)
    schedule = held.schedule(o.schedule, n_micro)
    refuse_sharding(o, mesh, stage, schedule, n_micro, fewest)
    policy = choose(Setup(glue(o), held, device, algorithm=o.algorithm, optimizer=optimizer))
    policy.initialise()
    feed = held.feed(policy.layout.device, policy.layout.dtype, tokens=inputs.tokens)
    inference = Inference(stage, feed, held.neighbours)
    n_classes = try_one_sample(inference, loss, inputs, held)
    if isinstance(inputs.training, Dataset) and n_classes is not None:
        labelled = inputs.training
        on_first(control, lambda: scan_labels(labelled, n_classes))

    stepper = offloaded(optimizer, o, policy.storage, device, control)
    held.refuse_optimizer(stepper)
    state = State(stage.model, stepper, inputs.transforms, whole=model, mesh=mesh, control=control, policy=policy)
    synchronise_batch_norm(stage.model, held.replicas, n_micro, mesh.n_places, drop_last=o.drop_last)
    held.start_alike(state.arrays())

    n_places, (first, last) = mesh.n_places, placement.own_micro_batches
    policy.open(stepper, rate(plan.steps) if rate else lambda step: stepper.lr)
    reducer, timeline = policy.reducer, policy.reducer.timeline
    loader = Loader(inputs.training, sampler, n_micro, first, last, transforms=inputs.transforms, augment=inputs.augment,
                    n_classes=n_classes, workers=o.workers, span=timeline.span)
    mesh.progress.landed = timeline.look
    pipeline = Pipeline(stage, loss, control, reducer, feed, n_micro=n_micro, seed=o.seed, schedule=schedule,
                        after_forward=policy.statistics.after_forward, neighbours=held.neighbours, counts=held.counts,
                        span=timeline.span)
    read, n_chunks = inputs.chunks(n_classes)
    evaluator = Evaluator(inference, loss, read, n_chunks, control, place=mesh.place, n_places=n_places,
                          counts=held.counts, classes=held.classes,
                          in_step=placement.in_step or policy.cuts_parameters) if n_chunks else None
    tuning = make_tuning(o, reducer, control, mesh)
    trainer = Trainer(pipeline=pipeline, update=policy, loader=loader, evaluator=evaluator, channel=control, plan=plan,
                      span=timeline.span)
    trainer.observers += [Tune(tuning), *([] if o.quiet or control.rank else [Console()])]
    trainer.notes += policy.notes + held.notes
    if o.sharding != "none" and n_places > 1:
        trainer.notes.append(memory_text(control.gather_objects(policy.measured()), o.sharding, per_node=policy.per_node))
    tuning.choices |= policy.choices | held.choices
    return Job(trainer, state, plan, o, control, held, policy, tuning, timeline, numerics)


def glue(o: Options) -> Any:
    """Until `assemble` is given sections."""
    from mpitrain import config as c
    return c.Config(run=c.RunConfig(seed=o.seed), train=c.TrainConfig(precision=o.precision),
                    optimizer=c.OptimizerConfig(clip_norm=o.clip_norm), comm=c.CommConfig(
                        algorithm=o.algorithm, bucket_mb=o.bucket_bytes / 2**20, wire_dtype=o.wire,
                        node_shared=o.node_shared, sharding=o.sharding))


def make_tuning(o: Options, reducer: GradientReducer, control: Channel, mesh: Mesh) -> Tuning:
    """What the first steps choose. Raises ConfigError where a progress thread is asked for and cannot be had."""
    if o.progress not in POLICIES:
        raise ConfigError(f'progress = "{o.progress}" is not there{nearest(o.progress, POLICIES)}')
    on_gpu = reducer.storage.device.name == "gpu"
    if o.progress == "thread" and on_gpu:
        raise ConfigError('comm.progress = "thread" is for train.device = "cpu": a GPU computes while the program polls; set '
                          'comm.progress = "poll"')
    useful = reducer.bucket_sum.size > 1 and not on_gpu
    allowed = o.progress == "thread" or (o.progress == "auto" and threads_may_call_mpi())
    return Tuning(reducer, control, progress=o.progress, buckets=o.tune_buckets,
                  thread=mesh.progress.thread() if useful and allowed else None)


def local_rank(channel: Channel) -> int:
    """This rank's number among those on its host."""
    hosts = channel.gather_objects(socket.gethostname())
    return hosts[:channel.rank].count(hosts[channel.rank])


def make_plan(o: Options, sampler: Sampler) -> Plan:
    if bool(o.steps) == bool(o.epochs):
        raise ConfigError("give the length of the run as steps or as epochs")
    return Plan(steps=o.steps or o.epochs * sampler.steps_per_epoch, steps_per_epoch=sampler.steps_per_epoch,
                batch_size=o.batch_size, eval_every=o.eval_every or sampler.steps_per_epoch,
                checkpoint_every=o.checkpoint_every, keep_best=o.keep_best, log_every=o.log_every)
