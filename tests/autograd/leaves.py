"""Leaves for the tests of the engine."""

from __future__ import annotations

import numpy as np

from mpitrain.autograd import Tensor


class Trained(Tensor):
    """A leaf of the kind that a split backward leaves for its second call."""

    __slots__ = ()
    is_parameter = True


def leaf(*values: float) -> Tensor:
    return Tensor(np.array(values, dtype=np.float64), requires_grad=True)


def trained(*shape: int, seed: int = 0) -> Trained:
    return Trained(np.random.default_rng(seed).standard_normal(shape), requires_grad=True)
