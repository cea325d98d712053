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
from mpitrain.parallel.compress.compressor import Compressor, Host, Make, Message, Piece, State
from mpitrain.parallel.compress.pieces import PADDING
from mpitrain.placement.buckets import Bucket


class Active(OneBit):
    """1 bit for the elements of `moves(start, stop)`, in the layout's numbers, where the array begins `at`; others arrive as 0.

    A block's scale is the mean size of those alone. `version()` says when `moves` may have changed: never within a step.
    """

    at = 0
    moves: Callable[[int, int], NDArray[np.bool_]]
    version: Callable[[], Any]

    def __init__(self, pieces: Sequence[Piece], n: int, *, seed: int = 0, feedback: bool = True):
        super().__init__(pieces, n, seed=seed, feedback=feedback)
        self._known: dict[tuple[int, int], Any] = {}          # What `_active` has found, with its version.

    def encode(self, step: int, worker: int, values: Host, error: Host | None, first: int, stop: int, message: Message) -> None:
        active, weights = self._active(first, stop)
        if active is None:
            super().encode(step, worker, values, error, first, stop, message)
            return
        wanted = values.copy() if error is None else values + error
        wanted *= active                                      # NaN and infinity come through: times 0 they are NaN.
        super().encode(step, worker, wanted, None, first, stop, message)
        scales, q = self._parts(message, first, stop)
        scales *= weights
        if error is None:
            return
        bounds = self.bounds[first:stop + 1]
        kernels.version_of("onebit_decode")(q, bounds, -scales, wanted, 1)
        wanted *= active
        bad = np.flatnonzero(np.isnan(scales))
        for block in bad:                                     # Its residual stays as it was.
            own = slice(*(bounds[block:block + 2] - bounds[0]))
            wanted[own] = error[own]
        error[...] = wanted

    def decode(self, message: Message, first: int, stop: int, total: Host, add: bool) -> None:
        super().decode(message, first, stop, total, add)
        active, _ = self._active(first, stop)
        if active is not None:
            total *= active

    def _active(self, first: int, stop: int) -> tuple[NDArray[np.bool_] | None, Host]:
        """Which elements of these blocks move, None where all do; and of each block, how many elements it has for one that does:
        times that the mean size of all is the mean of those that move."""
        version = self.version()
        if self._known.get((first, stop), (None,))[0] != version:
            bounds = self.bounds[first:stop + 1]
            start, end = int(bounds[0]), int(bounds[-1])
            active = self.moves(self.at + start, self.at + end)
            for piece in self.pieces:                         # Zeros between parameters are blocks of their own.
                if piece.name == PADDING:
                    active[max(0, piece.start - start):max(0, piece.stop - start)] = True
            moving = np.add.reduceat(active, bounds[:-1] - start, dtype=np.int64) if end > start else np.zeros(0, np.int64)
            weights = (np.diff(bounds) / np.maximum(moving, 1)).astype(np.float32)
            self._known[first, stop] = version, None if active.all() else active, weights
        _, found, weights = self._known[first, stop]
        return found, weights


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
            self.dense_sent += self.dense_of[bucket.start]
            return Landed()
        if kind == PACKED:
            self.optimizer.put(array, bucket.start, self.step() + 1, self.rate())
        return plain.start()

    def _state(self, compressor: Compressor, start: int, name: str) -> State:
        assert isinstance(compressor, Active)
        compressor.at, compressor.moves = start, lambda first, stop: ~self.optimizer.never(first, stop)
        compressor.version = lambda: self.optimizer.variance_step
        return super()._state(compressor, start, name)
