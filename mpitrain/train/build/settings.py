"""Settings of a run that follow from its configuration: its intervals, and what is tuned in its first steps."""

from __future__ import annotations

from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.progress import threads_may_call_mpi
from mpitrain.config import CommConfig, Config
from mpitrain.data import Sampler
from mpitrain.optim.optimizer import OPTIMIZERS
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.tuning import Tuning
from mpitrain.train.intervals import Plan


def make_tuning(comm: CommConfig, reducer: GradientReducer, control: Channel, mesh: Mesh) -> Tuning:
    """The tuning of the first steps. Raises ConfigError if a progress thread is asked for and cannot be had."""
    useful = reducer.bucket_sum.size > 1 and reducer.storage.device.name != "gpu"
    allowed = comm.progress == "thread" or (comm.progress == "auto" and threads_may_call_mpi())
    return Tuning(reducer, control, progress=comm.progress, buckets=comm.bucket_mb == "auto",
                  thread=mesh.progress.thread() if useful and allowed else None)


def make_plan(config: Config, sampler: Sampler) -> Plan:
    """The length of the run and its intervals, in steps."""
    t = config.train
    return Plan(steps=t.steps or t.epochs * sampler.steps_per_epoch, steps_per_epoch=sampler.steps_per_epoch,
                batch_size=sampler.batch, eval_every=t.eval_every or sampler.steps_per_epoch,
                checkpoint_every=config.checkpoint.every, keep_best=config.checkpoint.best, log_every=config.log.every)


def can_leave_out(config: Config) -> bool:
    """Whether a run that ends at a step that is not finite could leave that step out instead, on all ranks alike."""
    if config.train.on_nan != "stop" or config.comm.compress or config.sync.levels:
        return False
    return not getattr(OPTIMIZERS.resolve(config.optimizer.name, config.folder), "sends", False)
