"""What operations of several steps compute in one pass, composed of operations: where their higher derivatives come from."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Tensor
from mpitrain.backend import Array, is_float
from mpitrain.ops.activation import softmax
from mpitrain.ops.choice import where
from mpitrain.ops.elementwise import sqrt
from mpitrain.ops.linalg import matmul
from mpitrain.ops.reduce import mean
from mpitrain.ops.shape import reshape, swapaxes


def normalised(x: Tensor, dims: tuple[int, ...], eps: float, *, centred: bool = True) -> Tensor:
    """(x - mean) / sqrt(variance + eps), each over `dims`; without the mean where not `centred`."""
    if centred:
        x = x - mean(x, dims, True)
    return x / sqrt(mean(x * x, dims, True) + eps)


def by_channel(x: Tensor, weight: Tensor | None) -> Tensor:
    """x (N, C, ...) times weight (C,)."""
    return x if weight is None else x * reshape(weight, (-1, *(1,) * (x.ndim - 2)))


def channel_sums(x: Tensor) -> Tensor:
    """(C,) from x (N, C, ...)."""
    return x.sum((0, *range(2, x.ndim)))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, *, causal: bool, scale: float) -> Tensor:
    """softmax(scale q k' + mask) v; zeros for queries that may look nowhere. `mask` as in `scaled_dot_product_attention`."""
    scores = matmul(q, swapaxes(k, -1, -2)) * scale
    xp, allowed = q.xp, q.xp.ones(scores.shape, bool)
    if causal:
        allowed &= xp.tri(*scores.shape[-2:], dtype=bool)
    if mask is not None:
        values: Array = mask.array if isinstance(mask, Tensor) else mask
        if is_float(values.dtype):
            scores = scores + mask
            allowed &= values > -xp.inf
        else:
            allowed &= values
    lowest = xp.finfo(scores.dtype).min
    weights = softmax(where(allowed, scores, scores.dtype.type(lowest)))
    return matmul(where(allowed, weights, scores.dtype.type(0)), v)
