"""An optimizer that is an exchange, too (`optim.one_bit`): what does not go with it, and what is to know that ranks drift."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from mpitrain.checkpoint.drift import Drift
from mpitrain.checkpoint.manifest import Checkpoint
from mpitrain.comm.messages.channel import Channel
from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.optim import Optimizer
from mpitrain.parallel.policies.policy import Policy
from mpitrain.schedules.grid import Grid
from mpitrain.train.build.extension import Assembled, Extension
from mpitrain.train.observers.observer import Observer

if TYPE_CHECKING:
    from mpitrain.parallel.policies.one_bit import OneBitReplicated


def refuse_one_bit(config: Config, grid: Grid, optimizer: Any, steps: int, *, on_gpu: bool) -> None:
    """ConfigError for the first thing that does not go with `optimizer`, made for nothing in particular, in a run of `steps`."""
    o, t, c = config.optimizer, config.train, config.comm
    what = f"{optimizer.title} exchanges its momentum at 1 bit after its freeze"
    drifts = getattr(optimizer, "local_steps", 1) > 1
    for wrong, why, found, instead in (
            (o.clip_norm > 0, "of which no gradient can be clipped", f"optimizer.clip_norm = {o.clip_norm:g}", "0"),
            (bool(o.groups or config.lora.rank), "and has one rule for all parameters",
             "optimizer.groups" if o.groups else f"lora.rank = {config.lora.rank}", "[]" if o.groups else "0"),
            (o.offload != "none", "which each bucket is made of", f'optimizer.offload = "{o.offload}"', '"none"'),
            (c.sharding != "none", "of which every rank needs all", f'comm.sharding = "{c.sharding}"', '"none"'),
            (c.node_shared, "of which every rank sends its own", "comm.node_shared = true", "false"),
            (bool(c.compress), "so that it is compressed already", f'comm.compress = "{c.compress}"', '""'),
            (c.bucket_mb == "auto", "in blocks of its buckets, which stay", 'comm.bucket_mb = "auto"', "a number"),
            (c.library != "mpi", "by our own messages", f'comm.library = "{c.library}"', '"mpi"'),
            (on_gpu, "which is arithmetic of the CPU", 'train.device = "gpu"', '"cpu"'),
            (t.precision != "float32", "of float32", f'train.precision = "{t.precision}"', '"float32"'),
            (t.reproducible == "layout", "each rank by itself, so that bits depend on their number",
             'train.reproducible = "layout"', '"run"'),
            (t.on_nan != "stop", "and what a rank has left out of a message cannot be taken back", f'train.on_nan = "{t.on_nan}"',
             '"stop"'),
            (t.on_lost == "go_on", "and a rank keeps what its messages left out, that only it has", 'train.on_lost = "go_on"',
             '"stop"'),
            (bool(config.shrink.prune), "whose signs cannot say 0", f'shrink.prune = "{config.shrink.prune}"', '""'),
            (drifts and config.average.kind != "none", "and ranks have weights of their own between exchanges",
             f'average.kind = "{config.average.kind}"', '"none", or optimizer.local_steps = 1'),
            (grid.size("site") > 1, "over all ranks", f"mesh.site = {grid.size('site')}", "1"),
            (bool(config.workers.count), "of ranks, which workers are not", f"workers.count = {config.workers.count}", "0"),
            (config.privacy.unit != "none", "of which no clip bounds a row's part", f'privacy.unit = "{config.privacy.unit}"',
             '"none"'),
            (grid.size("ep") > 1, "over all data-parallel ranks alike", f"mesh.ep = {grid.size('ep')}", "1")):
        if wrong:
            raise ConfigError(f'{what}, {why}, found {found}; set it to {instead}, or optimizer.name = "adamw"')
    optimizer.planned(steps, 1)


class End(Observer):
    """Ends a run with the mean of its ranks. The first observer: the others see that."""

    def __init__(self, policy: OneBitReplicated):
        self.policy = policy

    def finish(self, step: int) -> None:
        self.policy.end()


class OneBit(Extension):
    """What is evaluated, and what a checkpoint and the end of a run call its parameters, is the mean of the ranks. Checkpoints
    have what each has by itself, too."""

    def optimizer(self, made: Optimizer, policy: Policy, control: Channel, steps: int) -> Optimizer:
        cast(Any, made).planned(steps, policy.channel.size)
        return made

    def join(self, run: Assembled) -> None:
        self.policy = cast("OneBitReplicated", run.policy)
        self.drift = Drift(self.policy)
        run.state.kept.append(self.drift)
        run.trainer.weights = self.policy.mean_in_use
        run.trainer.observers.insert(0, End(self.policy))
        if run.trainer.evaluator is not None:
            run.trainer.evaluator.weights = self.policy.mean_in_use

    def restored(self, found: Checkpoint, *, resumed: bool) -> None:
        self.drift.restore(found)
        self.policy.recompute()
