"""The norm of a gradient that is cut over ranks as the model is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import asnumpy
from mpitrain.comm.face import AnyChannel
from mpitrain.comm.mesh import Mesh
from mpitrain.kernels.optimizer import NORM_BLOCK, square_sums
from mpitrain.nn.parameter import Described
from mpitrain.optim import Segment, squared_norm
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
        self._places: list[tuple[Segment, int, int]] = []     # Where the sums of this rank's segments are in the table.
        self._names: list[str] = []
        if self.channel is not None:
            self._agree([s for s in self.segments if mesh is None or is_first(s.parameter, mesh, without=("pp", *COPIES))])
            nbytes = max(1, len(self._names)) * 8
            memory = np.zeros(nbytes, np.uint8) if allocate is None else allocate(nbytes)
            self._sums: np.ndarray[Any, Any] = memory.view(np.float64)[:len(self._names)]
            self._add = self.channel.prepare(self._sums, "gradient norm")

    def _agree(self, own: Sequence[Segment]) -> None:
        assert self.channel is not None
        mine = [[s.name, list(s.parameter.offset), s.first, -(-(s.stop - s.start) // NORM_BLOCK)] for s in own]
        everyone = self.channel.messages.gather_objects(mine)
        table = sorted((name, offset, first, rank, blocks) for rank, held in enumerate(everyone)
                       for name, offset, first, blocks in held)
        places = {}
        for name, _, first, rank, blocks in table:
            places[name, first, rank] = len(self._names), blocks
            self._names += [name] * blocks
        self._places = [(s, *places[s.name, s.first, self.channel.rank]) for s in own]

    def __call__(self, flat: Any) -> float:
        if self.channel is None:
            return math.sqrt(squared_norm(self.segments, flat))
        sums = self._table(flat)
        return math.sqrt(float(np.add.accumulate(sums)[-1])) if sums.size else 0.0

    def worst(self, flat: Any) -> str:
        """The first parameter whose gradient is not finite. It communicates like the norm itself."""
        if self.channel is None:
            for s in self.segments:
                if not np.isfinite(float(abs(flat[s.start:s.stop]).max(initial=0))):
                    return f'"{s.name}"'
            return "some parameter"
        sums = self._table(flat)
        return next((f'"{name}"' for name, value in zip(self._names, sums) if not np.isfinite(value)), "some parameter")

    def _table(self, flat: Any) -> np.ndarray[Any, Any]:
        sums = self._sums
        sums.fill(0)
        for segment, place, blocks in self._places:
            sums[place:place + blocks] = asnumpy(square_sums(flat[segment.start:segment.stop]))
        self._add.run()                                       # Exact: only one rank has a number in each place.
        return sums


def is_first(leaf: Described, mesh: Mesh, *, without: Sequence[str] = ("pp",)) -> bool:
    """Whether this rank is the first of those with the same part of `leaf`, along all axes but `without`; False for a twin."""
    if getattr(leaf, "twin_of", ""):
        return False
    return all(axis in leaf.placement or axis in without or mesh.coordinate(axis) == 0 for axis in mesh.axes)
