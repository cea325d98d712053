"""The norm of a gradient that is cut over ranks as the model is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.comm.face import AnyChannel
from mpitrain.comm.mesh import Mesh
from mpitrain.kernels.optimizer import NORM_BLOCK, conclude_norm
from mpitrain.nn.parameter import Described
from mpitrain.optim import Segment
from mpitrain.optim.norm import BlockSums, total_of
from mpitrain.optim.places import memory_of
from mpitrain.schedules.grid import COPIES


class GradientNorm:
    """The norm over the whole model, in which copies and twins of a parameter count once.

    The squares are summed in blocks of 4,096 elements of a parameter's part, and the blocks are added in the order of (name,
    place of the part, block), on all ranks alike: how the model is cut into stages does not change a bit. `channel` connects
    the ranks that have parts of one model; it communicates. Called with the flat gradients. `segments` may be parts of
    parameters that begin at such a block. Without a `mesh`, no two ranks have the same part. The table of the blocks' sums lies
    in memory of `allocate` (default: the rank's own).
    """

    def __init__(self, segments: Sequence[Segment], mesh: Mesh | None = None, channel: AnyChannel | None = None, *,
                 allocate: Callable[[int], Any] | None = None):
        self.segments = [s for s in segments if not s.parameter.twin_of and s.parameter.trained_from < math.inf]
        self.channel = channel if channel is not None and channel.size > 1 else None
        self._of_blocks = BlockSums(self.segments)
        self._places: list[tuple[int, int]] = []              # Where this rank's sums are in the table, and how many.
        self._names: list[str] = []
        if self.channel is not None:
            self._agree([s for s in self.segments
                         if mesh is None or is_first(s.parameter, mesh, without=("site", "pp", *COPIES))])
            nbytes = max(1, len(self._names)) * 8
            memory = np.zeros(nbytes, np.uint8) if allocate is None else allocate(nbytes)
            self._sums: np.ndarray[Any, Any] = memory.view(np.float64)[:len(self._names)]
            self._add = self.channel.prepare(self._sums, "gradient norm")

    def _agree(self, own: Sequence[Segment]) -> None:
        assert self.channel is not None
        self._of_blocks = BlockSums(own)
        mine = [[s.name, list(s.parameter.offset), s.first, -(-(s.stop - s.start) // NORM_BLOCK)] for s in own]
        everyone = self.channel.messages.gather_objects(mine)
        table = sorted((name, offset, first, rank, blocks) for rank, held in enumerate(everyone)
                       for name, offset, first, blocks in held)
        places = {}
        for name, _, first, rank, blocks in table:
            places[name, first, rank] = len(self._names), blocks
            self._names += [name] * blocks
        self._places = [places[s.name, s.first, self.channel.rank] for s in self._of_blocks.segments]

    def __call__(self, flat: Any) -> float:
        if self.channel is None:
            return math.sqrt(total_of(asnumpy(self._of_blocks(flat))))
        return math.sqrt(total_of(self._table(flat)))

    def conclude(self, flat: Any, numbers: Array, limit: float, *, interval: int = 0, growth: float = 2.0,
                 backoff: float = 0.5) -> None:
        """Norm, factor of clipping and whether all is finite into `numbers`, on the flat gradients' device; see `conclude_norm`.

        Two launches, for which nobody waits. Where ranks have parts of the model it communicates, and the host waits for its own
        part of the sums; all ranks find the same then.
        """
        if self.channel is None:
            sums = self._of_blocks(flat)
        else:
            sums = array_module(memory_of(flat)).asarray(np.array([total_of(self._table(flat))]))
        conclude_norm(numbers, sums, limit, interval, growth, backoff)

    def worst(self, flat: Any) -> str:
        """The first parameter whose gradient is not finite. It communicates like the norm itself."""
        if self.channel is None:
            sums = asnumpy(self._of_blocks(flat))
            names = [s.name for s in self._of_blocks.segments for _ in range(-(-(s.stop - s.start) // NORM_BLOCK))]
            found = {name for name, value in zip(names, sums, strict=True) if not np.isfinite(value)}
            return next((f'"{s.name}"' for s in self.segments if s.name in found), "some parameter")
        sums = self._table(flat)
        return next((f'"{name}"' for name, value in zip(self._names, sums) if not np.isfinite(value)), "some parameter")

    def _table(self, flat: Any) -> np.ndarray[Any, Any]:
        sums = self._sums
        sums.fill(0)
        own, done = asnumpy(self._of_blocks(flat)), 0         # One copy, not one for each parameter.
        for place, blocks in self._places:
            sums[place:place + blocks] = own[done:done + blocks]
            done += blocks
        self._add.run()                                       # Exact: only one rank has a number in each place.
        return sums


def is_first(leaf: Described, mesh: Mesh, *, without: Sequence[str] = ("pp",)) -> bool:
    """Whether this rank is the first of those with the same part of `leaf`, along all axes but `without`; False for a twin."""
    if getattr(leaf, "twin_of", ""):
        return False
    return all(axis in leaf.placement or axis in without or mesh.coordinate(axis) == 0 for axis in mesh.axes)
