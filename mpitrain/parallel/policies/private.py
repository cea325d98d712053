"""Training in which each row's gradient is bounded, and their sum hidden in noise (Abadi et al., 2016), with any optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpitrain.backend import Array
from mpitrain.config import Config
from mpitrain.errors import ConfigError, MeshError
from mpitrain.parallel.gradients.clipped import ClippedReducer
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.policies.replicated import Replicated
from mpitrain.privacy.mechanism import Mechanism
from mpitrain.schedules.grid import Grid

WHAT = 'privacy.unit = "sample" clips the gradient of each row by itself'


def whole_rows(config: Config, grid: Grid, on_gpu: bool) -> Iterator[Exception]:
    """A rank has the whole gradient of a row, and ranks add up what was clipped, unchanged."""
    for axis, n in grid.lengths.items():
        if axis != "dp" and n > 1:
            yield MeshError(f"{WHAT}, and mesh.{axis} = {n} does not sum whole ones over all ranks; set mesh.{axis} = 1")
    c = config.comm
    for wrong, found, instead in (
            (c.sharding != "none", f'comm.sharding = "{c.sharding}"', 'comm.sharding = "none"'),
            (c.node_shared, "comm.node_shared = true", "comm.node_shared = false"),
            (c.bucket_mb == "auto", 'comm.bucket_mb = "auto"', "comm.bucket_mb to a number"),
            (bool(c.compress), f'comm.compress = "{c.compress}"', 'comm.compress = ""'),
            (bool(config.sync.levels), "[[sync]]", "no level of exchange"),
            (c.wire_dtype != "float32", f'comm.wire_dtype = "{c.wire_dtype}"', 'comm.wire_dtype = "float32"'),
            (on_gpu, 'train.device = "gpu"', 'train.device = "cpu"')):
        if wrong:
            yield ConfigError(f"{WHAT}, and adds up what is left, found {found}; set {instead}")


class Private(Replicated):
    """`mechanism` is set before `open`."""

    rules = (whole_rows,)
    mechanism: Mechanism
    by_row = True                                             # whether each micro-batch is a row, to be clipped when it is over

    def reducer_over(self, bucket_sum: Any, **options: Any) -> GradientReducer:
        if not self.by_row:
            return super().reducer_over(bucket_sum, **options)
        return ClippedReducer(self.layout, bucket_sum, bucket_bytes=self.bucket_bytes, chunks=self.stage.sizes,
                              progress=self.mesh.progress.progress, mechanism=self.mechanism, **options)

    def own_gradients(self, gradients: Array) -> Any:
        self.mechanism.release(gradients, self.step)
        return gradients
