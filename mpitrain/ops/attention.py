"""Scaled dot-product attention: softmax(q k' / sqrt(D)) v (Vaswani et al.: "Attention is all you need", 2017).

Letters: `B` batch, `H` heads, `L` queries, `S` keys, `D` width of q and k, `E` width of v.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor, differentiate
from mpitrain.backend import Array, is_float
from mpitrain.backend.random import current
from mpitrain.errors import ConfigError, GraphError, ShapeError
from mpitrain.kernels.attention import attention_weights, attention_weights_gradient
from mpitrain.kernels.dropout import Dropping
from mpitrain.kernels.flash_attention import flash_attention, flash_attention_grad
from mpitrain.kernels.product import products
from mpitrain.ops import composed
from mpitrain.ops.shape import broadcast_to, expand_dims, reshape

__all__ = ["scaled_dot_product_attention", "self_attention"]


def scaled_dot_product_attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *, is_causal: bool = False,
                                 scale: float | None = None, enable_gqa: bool = False, operands: str = "") -> Tensor:
    """(B, H, L, E) from query (B, H, L, D), key (B, H, S, D) and value (B, H, S, E); `scale` is 1 / sqrt(D) by default.

    `attn_mask` broadcasts to (B, H, L, S): boolean, True where a query may look, or floating-point numbers that are added to
    the scaled scores. With `is_causal`, query i looks at keys 0..i. A query that may look nowhere gets zeros. Leading dims
    broadcast. With `enable_gqa`, key and value may have fewer heads than the query, each for as many neighbouring heads of it
    (Ainslie et al., 2023). Without a mask the L x S weights are never kept, on the host. With `operands` "bfloat16", and without
    a mask, products of float32 round what they multiply to that format. Raises ShapeError where the shapes do not fit.
    """
    q, k, v, mask = query, key, value, attn_mask
    shapes = [tuple(t.shape) for t in (q, k, v)]
    if min(map(len, shapes)) < 2 or shapes[0][-1] != shapes[1][-1] or shapes[1][-2] != shapes[2][-2]:
        raise ShapeError("scaled_dot_product_attention: expected q (..., L, D), k (..., S, D) and v (..., S, E), found "
                         f"{shapes[0]}, {shapes[1]} and {shapes[2]}")
    if enable_gqa:
        k, v = (_for_all_heads(shapes[0], t) for t in (k, v))
    if not tuple(q.shape[:-2]) == tuple(k.shape[:-2]) == tuple(v.shape[:-2]):
        q, k, v = _of_one_batch(q, k, v)
    lead = tuple(q.shape[:-2])
    wanted = (*lead, shapes[0][-2], shapes[1][-2])
    if mask is not None and not _broadcasts(tuple(mask.shape), wanted):
        raise ShapeError(f"scaled_dot_product_attention: the mask has shape {tuple(mask.shape)}, expected one that broadcasts "
                         f"to {wanted}")
    if mask is not None and mask.dtype.kind != "b" and not is_float(mask.dtype):
        raise ShapeError(f"scaled_dot_product_attention: the mask is {mask.dtype}, expected bool, True where a query may look, "
                         "or floating-point numbers to add")
    factor = _default_scale(shapes[0][-1]) if scale is None else scale
    if mask is not None:
        return MaskedAttention.apply(q, k, v, mask, causal=is_causal, scale=factor)
    if len(lead) != 2:
        q, k, v = (reshape(t, math.prod(lead), 1, *t.shape[-2:]) for t in (q, k, v))
        mixed = Attention.apply(q, k, v, causal=is_causal, scale=factor, operands=operands)
        return reshape(mixed, *lead, shapes[0][-2], shapes[2][-1])
    return Attention.apply(q, k, v, causal=is_causal, scale=factor, operands=operands)


def self_attention(qkv: Any, heads: int, *, causal: bool = False, scale: float | None = None, dropout: float = 0.0,
                   layer: str = "", part: int = 0, operands: str = "") -> Tensor:
    """(B, L, H * D) from qkv (B, L, 3 * H * D): a row holds the queries of all heads, then the keys, then the values.

    What scaled_dot_product_attention gives for them, without a copy of a part or of a gradient of one. Weights are dropped
    with probability `dropout`, those that `ops.dropout` of the weights (B, H, L, L) with this `layer` and `part` would drop.
    `operands` as there.
    """
    shape = tuple(qkv.shape)
    if len(shape) != 3 or heads < 1 or shape[2] % (3 * heads):
        raise ShapeError(f"self_attention: expected qkv (batch, length, 3 x {heads} heads x width), found {shape}")
    factor = _default_scale(shape[2] // (3 * heads)) if scale is None else scale
    if not 0 <= dropout < 1:
        raise ConfigError(f"self_attention: dropout is {dropout}, expected at least 0 and less than 1")
    key = current().key(layer) if dropout else 0
    return SelfAttention.apply(qkv, heads=heads, causal=causal, scale=factor, dropout=dropout, key=key, part=part,
                               operands=operands)


class Attention(Function):
    """Backward computes the weights again: what is kept is the result, and two numbers for each query."""

    half = "products"
    floats = 4

    @staticmethod
    def forward(ctx: Context, q: Array, k: Array, v: Array, *, causal: bool, scale: float, operands: str = "") -> Array:
        ctx.causal, ctx.scale, ctx.kernels = causal, scale, flash_kernels(operands, q)
        out = _like(q, v.shape[-1], ctx.xp)
        ctx.save(q, k, v, out, *_forward(ctx, q, k, v, out))
        return out

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, ...]:
        q, k, v, *known = ctx.saved
        grads = tuple(_like(x, x.shape[-1], ctx.xp) if needed else None for x, needed in zip((q, k, v), ctx.needs))
        _backward(ctx, (q, k, v, known[0], grad), known[1:], grads)
        return grads

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return _derivatives(ctx, grad, None)


class SelfAttention(Function):
    """Attention among the parts of one array, whose gradient is one array too."""

    half = "products"
    floats = 4

    @staticmethod
    def forward(ctx: Context, qkv: Array, *, heads: int, causal: bool, scale: float, dropout: float, key: Any,
                part: int, operands: str = "") -> Array:
        batch, length, width = qkv.shape
        ctx.heads, ctx.causal, ctx.scale, ctx.kernels = heads, causal, scale, flash_kernels(operands, qkv)
        out = ctx.xp.empty((batch, length, width // 3), qkv.dtype)
        ctx.dropping = Dropping(current().rows(batch, ctx.xp), key, dropout, part) if dropout else None
        ctx.save(qkv, out, *_forward(ctx, *_parts(qkv, heads), _heads(out, heads), ctx.dropping))
        return out

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        qkv, out, *known = ctx.saved
        result = ctx.xp.empty(qkv.shape, qkv.dtype)
        _backward(ctx, (*_parts(qkv, ctx.heads), _heads(out, ctx.heads), _heads(grad, ctx.heads)), known,
                  _parts(result, ctx.heads), ctx.dropping)
        return result

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        if ctx.dropping is not None:
            raise GraphError("SelfAttention: with dropped weights it has a first derivative only; set dropout=0 where grad with "
                             "create_graph or retain_graph goes through")

        def attend(qkv: Tensor) -> Tensor:
            batch, length, width = qkv.shape
            parts = qkv.reshape(batch, length, 3, ctx.heads, width // (3 * ctx.heads)).transpose(2, 0, 3, 1, 4)
            mixed = composed.attention(parts[0], parts[1], parts[2], None, causal=ctx.causal, scale=ctx.scale)
            return mixed.transpose(0, 2, 1, 3).reshape(batch, length, width // 3)

        found: Tensor = differentiate(attend, [ctx.input(0)], [grad], (True,))[0]
        return found


class MaskedAttention(Function):
    """The weights softmax(scale * q k' + mask) are kept for backward."""

    floats = 3
    broadcasts = True                                 # the mask's gradient

    @staticmethod
    def forward(ctx: Context, q: Array, k: Array, v: Array, mask: Array, *, causal: bool, scale: float) -> Array:
        xp = ctx.xp
        ctx.causal, ctx.scale = causal, scale
        scores = products(q, k.swapaxes(-1, -2), out=xp.empty((*q.shape[:-1], k.shape[-2]), q.dtype))
        if is_float(mask.dtype) or scale <= 0:        # 0 and less would turn -inf into NaN and inf
            scores *= scores.dtype.type(scale)
            scale = 1.0
        if is_float(mask.dtype):
            scores += mask
        else:
            xp.copyto(scores, -math.inf, where=~mask)
        weights = attention_weights(scores, scale, causal, scores) if scores.size else scores
        ctx.save(q, k, v, weights, mask)
        return products(weights, v, out=_like(q, v.shape[-1], xp))

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, ...]:
        q, k, v, weights, _ = ctx.saved
        xp = ctx.xp
        dq = dk = dv = dmask = None
        if ctx.needs[2]:
            dv = products(weights.swapaxes(-1, -2), grad, out=xp.empty_like(v))
        if ctx.needs[0] or ctx.needs[1] or ctx.needs[3]:
            scores = products(grad, v.swapaxes(-1, -2), out=xp.empty(weights.shape, grad.dtype))
            if scores.size:
                attention_weights_gradient(weights, scores, 1.0 if ctx.needs[3] else ctx.scale, ctx.causal, scores)
            if ctx.needs[3]:
                dmask, scores = scores, scores * scores.dtype.type(ctx.scale)
            if ctx.needs[0]:
                dq = products(scores, k, out=xp.empty_like(q))
            if ctx.needs[1]:
                dk = products(scores.swapaxes(-1, -2), q, out=xp.empty_like(k))
        return dq, dk, dv, dmask

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return _derivatives(ctx, grad, ctx.input(3))


def _derivatives(ctx: Context, grad: Tensor, mask: Any) -> tuple[Any, ...]:
    def attend(q: Tensor, k: Tensor, v: Tensor, *masks: Any) -> Tensor:
        return composed.attention(q, k, v, *(masks or (None,)), causal=ctx.causal, scale=ctx.scale)

    return differentiate(attend, [*(ctx.input(i) for i in range(3)), *([] if mask is None else [mask])], [grad], ctx.needs)


def flash_kernels(operands: str, x: Array) -> tuple[Any, Any]:
    """Attention by blocks and its gradient for arrays like x: of rounded numbers where `operands` is "bfloat16"."""
    if operands != "bfloat16" or x.dtype.char != "f":
        return flash_attention, flash_attention_grad
    from mpitrain.kernels import flash_attention_bfloat16 as rounded
    return rounded.flash_attention_bfloat16, rounded.flash_attention_grad_bfloat16


def _forward(ctx: Context, q: Array, k: Array, v: Array, out: Array, dropping: Dropping | None = None) -> tuple[Array, ...]:
    """Fills `out`; what backward wants to know of it, or nothing where no query meets a key."""
    if 0 in (*q.shape[:-1], k.shape[-2]):
        out[...] = 0
        return ()
    known: tuple[Array, Array] = ctx.kernels[0](q, k, v, out, ctx.scale, ctx.causal, dropping)
    return known


def _backward(ctx: Context, arrays: tuple[Array, ...], known: list[Array], grads: tuple[Array | None, ...],
              dropping: Dropping | None = None) -> None:
    """Fills `grads`, those of q, k, v where they are not None, from q, k, v, out and its gradient."""
    if known:
        ctx.kernels[1](*arrays, *known, ctx.scale, ctx.causal, *grads, dropping)
        return
    for x in grads:
        if x is not None:
            x[...] = 0


def _parts(qkv: Array, heads: int) -> tuple[Array, Array, Array]:
    """Queries, keys and values (B, H, L, D), as views."""
    batch, length, width = qkv.shape
    q, k, v = qkv.reshape(batch, length, 3, heads, width // (3 * heads)).transpose(2, 0, 3, 1, 4)
    return q, k, v


def _heads(x: Array, heads: int) -> Array:
    """(B, H, L, D) of (B, L, H * D)."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2)


def _for_all_heads(shape: tuple[int, ...], x: Any) -> Any:
    """x (..., Hx, S, D) with each head as often as queries of `shape` (..., H, L, D) have heads for it."""
    own = tuple(x.shape)
    if len(shape) < 3 or len(own) < 3 or not own[-3] or shape[-3] % own[-3]:
        raise ShapeError(f"scaled_dot_product_attention: the heads of queries {shape} are no multiple of those of keys or values "
                         f"{own}, dims (..., heads, length, width)")
    if shape[-3] == own[-3]:
        return x
    repeated = broadcast_to(expand_dims(x, -3), (*own[:-2], shape[-3] // own[-3], *own[-2:]))
    return reshape(repeated, *own[:-3], shape[-3], *own[-2:])


def _of_one_batch(*tensors: Any) -> list[Any]:
    """The tensors with their leading dims broadcast."""
    try:
        lead = np.broadcast_shapes(*(tuple(t.shape[:-2]) for t in tensors))
    except ValueError:
        raise ShapeError("scaled_dot_product_attention: the leading dims of queries, keys and values do not broadcast: "
                         f"{', '.join(str(tuple(t.shape)) for t in tensors)}") from None
    return [broadcast_to(t, (*lead, *t.shape[-2:])) for t in tensors]


def _default_scale(width: int) -> float:
    return 1 / math.sqrt(max(width, 1))


def _like(x: Array, width: int, xp: Any) -> Array:
    """Memory (..., width) in x's order of dims, where that keeps rows whole: heads split off a row join again for free."""
    made = xp.empty_like(x) if width == x.shape[-1] else xp.empty((*x.shape[:-1], width), x.dtype)
    return made if made.strides[-1] == made.itemsize else xp.empty(made.shape, made.dtype)


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) <= len(wanted) and all(a in (1, b) for a, b in zip(shape[::-1], wanted[::-1]))
