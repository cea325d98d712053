"""The global norm of the gradients, in an order of addition that no layout of ranks changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.kernels.optimizer import square_sums
from mpitrain.optim.optimizer import Segment


def squared_norm(segments: Sequence[Segment], flat: Array) -> float:
    """The sum of the squares of a flat array's `segments`, in float64.

    Each parameter is summed in blocks of 4,096 elements, and the blocks are added in (name, block) order, so the result
    does not depend on where the parameters lie. NaN and Inf come through.
    """
    chosen = sorted(segments, key=lambda s: (s.name, s.start))
    return _fold([square_sums(flat[s.start:s.stop]) for s in chosen])


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
    return float(np.add.accumulate(sums)[-1]) if len(sums) else 0.0  # accumulate adds one after the other; np.sum adds in pairs.
