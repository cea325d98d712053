"""Scaled dot-product attention: softmax(q k' / sqrt(D)) v (Vaswani et al.: "Attention is all you need", 2017)."""

from __future__ import annotations

import math
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, is_float
from mpitrain.errors import ShapeError
from mpitrain.kernels.attention import attention_weights, attention_weights_gradient


def scaled_dot_product_attention(q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None,
                                 mask: Any = None) -> Tensor:
    """(B, H, L, E) from q (B, H, L, D), k (B, H, S, D) and v (B, H, S, E); `scale` is 1 / sqrt(D) by default.

    `mask` broadcasts to (B, H, L, S): boolean, True where a query may look, or floating-point numbers that are added to
    the scaled scores. With `causal`, query i looks at keys 0..i. A query that may look nowhere gets zeros.
    Raises ShapeError where the shapes do not fit.
    """
    shapes = [tuple(t.shape) for t in (q, k, v)]
    if (min(len(s) for s in shapes) < 2 or not shapes[0][:-2] == shapes[1][:-2] == shapes[2][:-2]
            or shapes[0][-1] != shapes[1][-1] or shapes[1][-2] != shapes[2][-2]):
        raise ShapeError("scaled_dot_product_attention: expected q (..., L, D), k (..., S, D) and v (..., S, E), found "
                         f"{shapes[0]}, {shapes[1]} and {shapes[2]}")
    wanted = (*shapes[0][:-1], shapes[1][-2])
    if mask is not None and not _broadcasts(tuple(mask.shape), wanted):
        raise ShapeError(f"scaled_dot_product_attention: the mask has shape {tuple(mask.shape)}, expected one that broadcasts "
                         f"to {wanted}")
    factor = 1 / math.sqrt(max(shapes[0][-1], 1)) if scale is None else scale
    result: Tensor = Attention.apply(q, k, v, mask, causal=causal, scale=factor)
    return result


class Attention(Function):
    """The weights softmax(scale * q k' + mask) are kept for backward."""

    broadcasts = True                                 # the mask's gradient

    @staticmethod
    def forward(ctx: Context, q: Array, k: Array, v: Array, mask: Array | None, *, causal: bool, scale: float) -> Array:
        xp = ctx.xp
        ctx.causal, ctx.scale = causal, scale
        scores = xp.matmul(q, k.swapaxes(-1, -2), out=xp.empty((*q.shape[:-1], k.shape[-2]), q.dtype))
        if mask is not None and is_float(mask.dtype):
            scores *= scores.dtype.type(scale)
            scores += mask
            scale = 1.0
        elif mask is not None:
            xp.copyto(scores, -math.inf, where=~mask)
        weights = attention_weights(scores, scale, causal, scores) if scores.size else scores
        ctx.save(q, k, v, weights)
        return xp.matmul(weights, v, out=_like(q, v.shape[-1], xp))

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, ...]:
        q, k, v, weights = ctx.saved
        xp = ctx.xp
        dq = dk = dv = dmask = None
        if ctx.needs[2]:
            dv = xp.matmul(weights.swapaxes(-1, -2), grad, out=xp.empty_like(v))
        if ctx.needs[0] or ctx.needs[1] or ctx.needs[3]:
            scores = xp.matmul(grad, v.swapaxes(-1, -2), out=xp.empty(weights.shape, grad.dtype))
            if scores.size:
                attention_weights_gradient(weights, scores, 1.0 if ctx.needs[3] else ctx.scale, ctx.causal, scores)
            if ctx.needs[3]:
                dmask, scores = scores, scores * scores.dtype.type(ctx.scale)
            if ctx.needs[0]:
                dq = xp.matmul(scores, k, out=xp.empty_like(q))
            if ctx.needs[1]:
                dk = xp.matmul(scores.swapaxes(-1, -2), q, out=xp.empty_like(k))
        return dq, dk, dv, dmask


def _like(q: Array, width: int, xp: Any) -> Array:
    """Memory for the result in q's order of dims: heads that were split off a (B, L, H * D) array join again for free."""
    return xp.empty_like(q) if width == q.shape[-1] else xp.empty((*q.shape[:-1], width), q.dtype)


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) <= len(wanted) and all(a in (1, b) for a, b in zip(shape[::-1], wanted[::-1]))
