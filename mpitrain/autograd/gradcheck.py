"""A gradient check that users get too: one random direction compares backward with differences of forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.autograd.mode import mode
from mpitrain.autograd.tensor import Tensor
from mpitrain.backend import Array, array_module, is_array, is_float
from mpitrain.errors import GraphError, ShapeError


def gradcheck(function: Callable[..., Tensor], *inputs: Any, eps: float = 1e-6, tolerance: float = 1e-6,
              seed: int = 0) -> None:
    """Raises GraphError unless <v, J u> (central differences) equals <J'v, u> (backward) for random u and v.

    `inputs` are float64 arrays (differentiated), or anything else (passed through). One direction suffices: a wrong
    gradient is orthogonal to a random direction with probability zero. Running statistics stay as they are.
    """
    before, mode.recomputing = mode.recomputing, True
    try:
        _check(function, inputs, eps, tolerance, seed)
    finally:
        mode.recomputing = before


def _check(function: Callable[..., Tensor], inputs: Sequence[Any], eps: float, tolerance: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    moving = [i for i, x in enumerate(inputs) if is_array(x) and is_float(x.dtype)]
    if any(inputs[i].dtype != np.float64 for i in moving):
        raise ShapeError("gradcheck wants float64 arrays: differences of float32 values say nothing")
    directions = {i: _normal(rng, inputs[i]) for i in moving}
    tensors = [Tensor(x.copy(), requires_grad=True) if i in directions else x for i, x in enumerate(inputs)]
    result = function(*tensors)
    v = _normal(rng, result.array)
    result.backward(v)
    analytic = sum(float((tensors[i].grad * u).sum()) for i, u in directions.items() if tensors[i].grad is not None)

    def at(distance: float) -> Array:
        moved = [x + distance * directions[i] if i in directions else x for i, x in enumerate(inputs)]
        return function(*moved).array

    numeric = float(((at(eps) - at(-eps)) * v).sum()) / (2 * eps)
    scale = max(1.0, abs(numeric), abs(analytic))
    if not abs(numeric - analytic) <= tolerance * scale:
        raise GraphError(f"gradcheck: backward gives {analytic:.10g} along a random direction, "
                         f"differences of forward give {numeric:.10g}")


def _normal(rng: np.random.Generator, like: Array) -> Array:
    return array_module(like).asarray(rng.standard_normal(like.shape))
