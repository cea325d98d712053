"""What ranks send of a momentum: signs of the elements that ever had a gradient, of buckets that an optimizer has prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.backend import Array
from mpitrain.comm.face import AnyChannel
from mpitrain.comm.messages.prepare import Landed, Prepared
from mpitrain.comm.work import Collective, Work
from mpitrain.kernels import compress as kernels
from mpitrain.nn import FlatLayout
from mpitrain.optim.one_bit import LOCAL, PACKED
from mpitrain.parallel.compress.blocks import OneBit
from mpitrain.parallel.compress.channel import CompressedSum
from mpitrain.parallel.compress.compressor import Compressor, Host, Make, Message, State
from mpitrain.placement.buckets import Bucket

Bounds = NDArray[np.int64]


class Active(OneBit):
    """1 bit for the elements of `moves(start, stop)`, in the layout's numbers, where the array begins `at`; others arrive as 0.

    A block's scale is the mean size of those alone. `version()` says when `moves` may have changed: never within a step.
    """

    at = 0
    moves: Callable[[int, int], NDArray[np.bool_]]
    version: Callable[[], Any]

    def encode(self, step: int, worker: int, values: Host, error: Host | None, first: int, stop: int, message: Message) -> None:
        active, bounds = self._active(first, stop)
        if active is None:
            super().encode(step, worker, values, error, first, stop, message)
            return
        own, rest = values[active], None if error is None else error[active]
        bad = self._blocks_of(np.flatnonzero(~np.isfinite(values) & ~active), first, stop)
        for block in bad:                                     # What is not a number comes through from anywhere.
            own[bounds[block]:bounds[block + 1]] = np.nan
        scales, q = self._parts(message, first, stop)
        message[scales.nbytes:] = 0
        kernels.version_of("onebit_encode")(own, rest, bounds, scales, q[:bytes_of(bounds)])
        scales[bad] = np.nan
        if error is not None:
            error[~active], error[active] = 0, rest

    def decode(self, message: Message, first: int, stop: int, total: Host, add: bool) -> None:
        active, bounds = self._active(first, stop)
        if active is None:
            super().decode(message, first, stop, total, add)
            return
        scales, q = self._parts(message, first, stop)
        own = total[active]
        kernels.version_of("onebit_decode")(q[:bytes_of(bounds)], bounds, scales, own, int(add))
        if not add:
            total[...] = 0
        total[active] = own
        for block in np.flatnonzero(np.isnan(scales)):
            low, high = self.bounds[first + block:first + block + 2] - self.bounds[first]
            total[low:high] = np.nan

    def _blocks_of(self, places: Bounds, first: int, stop: int) -> Bounds:
        """The blocks, counted from `first`, in which these elements of blocks first .. stop lie."""
        starts = self.bounds[first:stop] - self.bounds[first]
        return np.unique(np.searchsorted(starts, places, side="right") - 1)

    def _active(self, first: int, stop: int) -> tuple[NDArray[np.bool_] | None, Bounds]:
        """Which elements of these blocks move, None where all do, and the bounds of the blocks in those alone."""
        known: dict[tuple[int, int], Any] = self.__dict__.setdefault("_known", {})
        version = self.version()
        if known.get((first, stop), (None,))[0] != version:
            bounds = self.bounds[first:stop + 1]
            active = self.moves(self.at + int(bounds[0]), self.at + int(bounds[-1]))
            counts = np.concatenate([[0], np.cumsum(active)])[bounds - bounds[0]]
            known[first, stop] = version, None if active.all() else active, counts.astype(np.int64)
        _, found, bounds = known[first, stop]
        return found, bounds


def bytes_of(bounds: Bounds) -> int:
    """Bytes of the signs of blocks with these bounds."""
    return int(((np.diff(bounds) + 7) // 8).sum())


class MomentumSum(CompressedSum):
    """The sum of what the optimizer `sends`: gradients as they are, momenta at 1 bit, or nothing.

    `step()` is the number of steps done, and `rate()` the learning rate of the present one. A single rank rounds, too:
    that is a part of the rule.
    """

    compares = False                                          # It is asked for by the optimizer's name.

    def __init__(self, channel: AnyChannel, layout: FlatLayout, optimizer: Any, *, step: Callable[[], int],
                 rate: Callable[[], float], seed: int):
        super().__init__(channel, layout, Make("signs", Active), step=step, seed=seed)
        self.optimizer, self.rate = optimizer, rate
        self.size = max(2, self.size)                         # So that the reducer starts it on one rank.

    @property
    def kind(self) -> str:
        """What ranks do in the present step."""
        found: str = self.optimizer.exchange(self.step() + 1)
        return found

    @property
    def compresses(self) -> bool:
        return self.kind == PACKED

    def prepare(self, bucket: Bucket, arrays: Sequence[Array]) -> Collective:
        return Prepared(partial(self._start, bucket, arrays[0], super().prepare(bucket, arrays)))

    def _start(self, bucket: Bucket, array: Array, plain: Collective) -> Work:
        kind = self.kind
        if kind == LOCAL:
            return Landed()
        if kind == PACKED:
            self.optimizer.put(array, bucket.start, self.step() + 1, self.rate())
        return plain.start()

    def _state(self, compressor: Compressor, start: int, name: str) -> State:
        assert isinstance(compressor, Active)
        compressor.at, compressor.moves = start, lambda first, stop: ~self.optimizer.never(first, stop)
        compressor.version = lambda: self.optimizer.variance_step
        return super()._state(compressor, start, name)
