"""The global norm of the gradients, in an order of addition that no layout of ranks changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.backend.runtime import runtime
from mpitrain.kernels.kernel import FORMATS
from mpitrain.kernels.optimizer import FACTOR, NUMBERS, SCALE, square_sums
from mpitrain.optim.layout import Segment
from mpitrain.optim.places import memory_of, place_in


class BlockSums:
    """Called with a flat array, the sums of the squares of blocks of 4,096 elements of each segment: float64 (blocks,).

    Blocks are in the order of (name, place, block). On a device they are made by one launch, over a table that is made once.
    """

    def __init__(self, segments: Sequence[Segment]):
        self.segments = sorted(segments, key=lambda s: (s.name, s.start))
        self._tables: dict[bool, Array] = {}

    def __call__(self, flat: Any) -> Array:
        memory = memory_of(flat)
        xp = array_module(memory)
        if xp is not np and memory.dtype.name in FORMATS and runtime(xp.__name__) is not None:
            return self._in_one_launch(flat, memory, xp)
        parts = [square_sums(flat[s.start:s.stop]) for s in self.segments]
        return xp.concatenate(parts) if parts else xp.zeros(0, np.float64)

    def _in_one_launch(self, flat: Any, memory: Array, xp: Any) -> Array:
        from mpitrain.kernels.device.code import contiguous
        from mpitrain.kernels.device.optimizer import blocks_of, sums_of_blocks
        table = self._tables.get(flat is memory)
        if table is None:
            places = [(place_in(flat, s.start), s.stop - s.start) for s in self.segments if s.stop > s.start]
            table = self._tables[flat is memory] = xp.asarray(blocks_of((start, start + n) for start, n in places))
        return sums_of_blocks(contiguous(memory), table)


def squared_norm(segments: Sequence[Segment], flat: Array) -> float:
    """The sum of the squares of a flat array's `segments`, in float64.

    Each parameter is summed in blocks of 4,096 elements, and the blocks are added in (name, block) order, so the result
    does not depend on where the parameters lie. NaN and Inf come through.
    """
    return total_of(asnumpy(BlockSums(segments)(flat)))


def sum_of_squares(x: Array) -> float:
    """The same for one flat array."""
    return total_of(asnumpy(square_sums(x)))


def total_of(sums: np.ndarray[Any, Any]) -> float:
    """The sum of the sums of blocks, one after the other; np.sum adds in pairs."""
    return float(np.add.accumulate(sums)[-1]) if len(sums) else 0.0


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied with so that their norm is at most `limit`; as PyTorch computes it."""
    return min(1.0, limit / (norm + 1e-6))


def numbers_of_a_step(xp: Any) -> Array:
    """float64 (8,): the numbers of a step in memory of `xp` (`kernels.optimizer.conclude_norm`), before the first one."""
    host = np.zeros(NUMBERS)
    host[FACTOR] = host[SCALE] = 1.0
    made: Array = xp.asarray(host)
    return made
