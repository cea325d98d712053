"""The policy of a federation: every rank has all parameters, and a step's gradient is the mean change of a round's workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpitrain.backend import Array
from mpitrain.comm.face import AnyChannel
from mpitrain.config import Config
from mpitrain.errors import ConfigError, MeshError
from mpitrain.parallel.gradients.bucket_sum import BucketSum, TreeSum
from mpitrain.parallel.policies.policy import Setup
from mpitrain.parallel.policies.replicated import Replicated
from mpitrain.parallel.workers.corrections import Correction
from mpitrain.parallel.workers.deltas import Deltas
from mpitrain.placement.buckets import Bucket
from mpitrain.schedules.grid import Grid

WHAT = "[workers] trains one worker after another on a rank"


def whole_models(config: Config, grid: Grid, on_gpu: bool) -> Iterator[Exception]:
    """Each rank runs the whole model by itself."""
    for axis in ("pp", "tp", "ep", "cp"):
        if grid.size(axis) > 1:
            yield MeshError(f"{WHAT}, which has the whole model, found mesh.{axis} = {grid.size(axis)}; set mesh.{axis} = 1")
    seats, usual, n = config.train.micro_batches, config.workers.usual, grid.n_places
    if n > seats:
        given, key = "", "workers.each_round"
        if seats != usual:
            key = "train.micro_batches"
            given = f" with seats for {seats}, {key} = {seats},"
        yield MeshError(f"a round of about {usual} workers{given} leaves some of {n} ranks without one; run with -n {seats} or "
                        f"less, or set {key} to {n} or more")
    c, o = config.comm, config.optimizer
    for wrong, found, instead in (
            (c.sharding != "none", f'comm.sharding = "{c.sharding}"', 'comm.sharding = "none"'),
            (c.node_shared, "comm.node_shared = true", "comm.node_shared = false"),
            (bool(c.compress), f'comm.compress = "{c.compress}"', 'comm.compress = ""'),
            (c.bucket_mb == "auto", 'comm.bucket_mb = "auto"', "comm.bucket_mb to a number"),
            (on_gpu, 'train.device = "gpu"', 'train.device = "cpu"'),
            (o.offload != "none", f'optimizer.offload = "{o.offload}"', 'optimizer.offload = "none"'),
            (bool(config.shrink.prune), f'shrink.prune = "{config.shrink.prune}"', 'shrink.prune = ""')):
        if wrong:
            yield ConfigError(f"{WHAT}, found {found}; set {instead}")


class Unsent(TreeSum):
    """Buckets stay where they are: the sum over ranks goes another way."""

    def prepare(self, bucket: Bucket, arrays: Sequence[Array]) -> None:
        return None


class Federated(Replicated):
    """A step is a round. `deltas` and `correction` belong to the workers on this rank; the optimizer is the outer rule."""

    rules = (whole_models,)

    def __init__(self, setup: Setup, channel: AnyChannel):
        super().__init__(setup, channel)
        self.clip_norm = 0.0                                  # It bounds the gradients of local steps.
        self.deltas = Deltas(setup.context.placement.n_micro)
        self.correction = Correction()

    def bucket_sum(self) -> BucketSum:
        assert self.tree is not None                          # whose leaves are seats
        return super().bucket_sum() if self.deltas.travels else Unsent(self.channel, self.tree)

    def own_gradients(self, gradients: Array) -> Any:
        return self.deltas.arrived(gradients, self.step)

    def settle(self) -> None:
        self.correction.settle(not self.blamed)
