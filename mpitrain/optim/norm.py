"""The global norm of the gradients, in an order of addition that no layout of ranks changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.kernels.optimizer import BLOCK, square_sums
from mpitrain.optim.optimizer import Segment, Storage

NORM_BLOCK = BLOCK
"""Elements of a parameter whose squares are added before anything else."""


def squared_norm(storage: Storage, flat: Array, segments: Sequence[Segment] | None = None) -> float:
    """The sum of the squares of a flat array's parameters (or of `segments`), in float64.

    Each parameter is summed in blocks of 4,096 elements, and the blocks are added in (name, block) order, so the result
    does not depend on where the parameters lie. NaN and Inf come through.
    """
    chosen = sorted(storage.segments if segments is None else segments, key=lambda s: (s.name, s.start))
    return _fold([square_sums(flat[s.start:s.stop]) for s in chosen])


class BlockSums:
    """The same norm where several ranks hold parts of the gradient: a table of block sums that each fills in for its parts.

    The table is float64 (size,), in (name, block) order; all parts together must cover all parameters, each beginning at a
    multiple of 4,096 elements from its parameter's start and ending at one, or at the parameter's end. A twin counts with the
    parameter whose twin it is, so it has no place.
    """

    def __init__(self, storage: Storage):
        self._first: dict[str, tuple[int, int]] = {}          # a parameter's start, and the place of its first sum
        self._names: list[str] = []                           # whose sum each place holds
        for s in sorted((s for s in storage.segments if not s.parameter.twin_of), key=lambda s: (s.name, s.start)):
            self._first[s.name] = s.start, len(self._names)
            self._names += [s.name] * -(-(s.stop - s.start) // NORM_BLOCK)
        self.size = len(self._names)

    def write(self, sums: Array, flat: Array, parts: Sequence[Segment]) -> None:
        """Fills in the places of `parts`, from a flat array of the storage's layout."""
        for part in parts:
            if part.name not in self._first:
                continue
            start, first = self._first[part.name]
            found = asnumpy(square_sums(flat[part.start:part.stop]))
            place = first + (part.start - start) // NORM_BLOCK
            sums[place:place + len(found)] = found

    def total(self, sums: Array) -> float:
        """What `squared_norm` of the whole gives, once every place is filled."""
        return float(np.add.accumulate(sums)[-1]) if self.size else 0.0

    def not_finite(self, sums: Array) -> str:
        """The first parameter whose sum is NaN or Inf."""
        return next((name for name, value in zip(self._names, sums) if not np.isfinite(value)), "")


def sum_of_squares(x: Array) -> float:
    """The same for one flat array."""
    return _fold([square_sums(x)])


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied with so that their norm is at most `limit`; as PyTorch computes it."""
    return min(1.0, limit / (norm + 1e-6))


def _fold(blocks: list[Any]) -> float:
    if not blocks:
        return 0.0
    sums = asnumpy(array_module(blocks[0]).concatenate(blocks))
    return float(np.add.accumulate(sums)[-1]) if len(sums) else 0.0       # one after the other; np.sum adds in pairs
