"""Multi-head attention with all that `nn.MultiHeadAttention` may be asked for: queries, keys and values of their own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import is_float
from mpitrain.errors import ConfigError, ShapeError


def attend(layer: Any, x: Any, mask: Any, key: Any, value: Any, padding: Any, need_weights: bool, causal: bool) -> Any:
    """What `layer` gives for these arguments of its forward."""
    if len(x.shape) == 2:
        return _alone(layer, x, mask, key, value, padding, need_weights, causal)
    _check(layer, x, key, value, padding)
    keys = x if key is None else key
    if layer.across is not None:
        own = layer.grouped and causal and all(one is None for one in (mask, key, value, padding)) and not need_weights
        if not own or layer.across.attend_groups is None:
            raise ConfigError(f'the attention "{layer.path}" is cut along positions (mesh.cp): fewer heads of keys, other keys '
                              "than x, padding, alibi, added keys and weights are not there then; set mesh.cp = 1")
        q, k, v = (_headed(layer, part) for part in _projected(layer, x, x, x))
        return layer.out(layer.across.attend_groups(*_extended(layer, q, k, v)))
    q, k, v = _projected(layer, x, keys, keys if value is None else value)
    heads = q.shape[2] // layer.head_width
    if layer.joint:
        layer.dropout.part = layer.qkv.weight.offset[0] // q.shape[2]
    else:
        layer.dropout.part = layer.query.weight.offset[0] // q.shape[2]
    mask = _scores_mask(layer, x, keys, mask, padding, heads)
    extra = (layer.bias_k is not None) + layer.zero_attention
    if extra:
        mask, causal = _opened(layer, mask, causal, x.shape[1], keys.shape[1], extra, q), False
    q, k, v = _extended(layer, *(_headed(layer, part) for part in (q, k, v)))
    if need_weights or layer.dropout.drops:
        y, weights = explicit(layer, q, k, v, mask, causal)
    else:
        y, weights = ops.scaled_dot_product_attention(q, k, v, is_causal=causal, attn_mask=mask, enable_gqa=True,
                                                      operands=layer.out.weight.operands), None
    y = layer.out(ops.reshape(ops.swapaxes(y, 1, 2), *x.shape[:2], heads * layer.head_width))
    return (y, weights) if need_weights else y


def _check(layer: Any, x: Any, key: Any, value: Any, padding: Any) -> None:
    keys = x if key is None else key
    values = keys if value is None else value
    parts = [layer.qkv] * 3 if layer.joint else [layer.query, layer.key, layer.value]
    for what, given, part in zip(("query", "key", "value"), (x, keys, values), parts):
        inputs = part.weight.shape[1]
        if len(given.shape) != 3 or given.shape[2] != inputs or given.shape[0] != x.shape[0]:
            raise ShapeError(f"MultiHeadAttention: the {what} has shape {tuple(given.shape)}, expected ({x.shape[0]}, length, "
                             f"{inputs})")
    if keys.shape[1] != values.shape[1]:
        raise ShapeError(f"MultiHeadAttention: {keys.shape[1]} keys and {values.shape[1]} values; there must be as many")
    if padding is not None and tuple(padding.shape) != tuple(keys.shape[:2]):
        raise ShapeError(f"MultiHeadAttention: the key_padding_mask has shape {tuple(padding.shape)}, expected "
                         f"{tuple(keys.shape[:2])}")
    if padding is not None and padding.dtype.kind != "b" and not is_float(padding.dtype):
        raise ShapeError(f"MultiHeadAttention: the key_padding_mask is {padding.dtype}, expected bool, True where a key is "
                         "padding, or floating-point numbers to add")


def _alone(layer: Any, x: Any, mask: Any, key: Any, value: Any, padding: Any, need_weights: bool, causal: bool) -> Any:
    """One sample without a batch."""
    key, value, padding = (a if a is None else ops.expand_dims(a, 0) for a in (key, value, padding))
    y = attend(layer, ops.expand_dims(x, 0), mask, key, value, padding, need_weights, causal)
    return tuple(ops.squeeze(part, 0) for part in y) if need_weights else ops.squeeze(y, 0)


def _projected(layer: Any, x: Any, keys: Any, values: Any) -> tuple[Tensor, ...]:
    if not layer.joint:
        return layer.query(x), layer.key(keys), layer.value(values)
    weight, bias = layer.qkv.weight, layer.qkv.bias
    if keys is x and values is x:
        return ops.split(layer.qkv(x), weight.shape[0] // 3, dim=-1)
    weights = ops.split(weight, weight.shape[0] // 3)
    biases = (None,) * 3 if bias is None else ops.split(bias, weight.shape[0] // 3)
    q, k, v = (ops.linear(a, w, b, operands=weight.operands) for a, w, b in zip((x, keys, values), weights, biases))
    return q, k, v


def _headed(layer: Any, x: Tensor) -> Tensor:
    """(B, H, L, D / H) of (B, L, D)."""
    return ops.swapaxes(ops.reshape(x, *x.shape[:2], x.shape[2] // layer.head_width, layer.head_width), 1, 2)


def _extended(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With the keys and values that each sample gets besides its own."""
    if layer.rope is not None:
        q, k = layer.turn(q), layer.turn(k)
    if layer.bias_k is not None:
        if k.shape[1] != layer.key_heads:
            raise ConfigError(f'the attention "{layer.path}" adds trained keys, which are not cut over ranks; set mesh.tp = 1')
        k, v = (ops.concatenate([a, ops.broadcast_to(_headed(layer, b), (*a.shape[:2], 1, a.shape[3]))], dim=2)
                for a, b in ((k, layer.bias_k), (v, layer.bias_v)))
    if layer.zero_attention:
        k, v = (ops.pad(a, [(0, 0), (0, 0), (0, 1), (0, 0)]) for a in (k, v))
    return q, k, v


def _scores_mask(layer: Any, x: Any, keys: Any, mask: Any, padding: Any, heads: int) -> Any:
    """One mask of what was given, (..., L, S): boolean where all of it is, else numbers, -inf where nobody looks."""
    xp = layer.out.weight.xp
    parts = [] if mask is None else [_plain(layer.here(mask, heads))]
    if padding is not None:
        parts.append((ops.logical_not(padding) if padding.dtype == bool else padding)[:, None, None, :])
    if layer.alibi:
        first = layer.dropout.part * heads
        slopes = np.array(alibi_slopes(layer.heads)[first:first + heads])
        gap = np.abs(np.arange(x.shape[1])[:, None] - np.arange(keys.shape[1]))
        parts.append(xp.asarray((-slopes[:, None, None] * gap).astype(layer.out.weight.dtype)))
    if not parts:
        return None
    if all(part.dtype == bool for part in parts):
        together = parts[0]
        for part in parts[1:]:
            together = ops.logical_and(together, part)
        return together
    total: Any = None
    for part in parts:
        if part.dtype == bool:
            part = xp.where(_plain(part), 0.0, -math.inf).astype(layer.out.weight.dtype)
        total = part if total is None else ops.add(total, part)
    return total


def _plain(mask: Any) -> Any:
    """The array of a boolean mask, which has no gradient; others as they are."""
    return mask.array if isinstance(mask, Tensor) and mask.dtype == bool else mask


def _opened(layer: Any, mask: Any, causal: bool, length: int, keys: int, extra: int, like: Tensor) -> Any:
    """The mask with columns for the added keys, at which everybody may look."""
    xp = like.xp
    mask = mask if mask is None else _plain(mask)
    if causal:
        allowed = xp.tri(length, keys, dtype=bool)
        if mask is None:
            mask = allowed
        elif mask.dtype == bool:
            mask = mask & allowed
        else:
            mask = ops.add(mask, xp.where(allowed, 0.0, -math.inf).astype(like.dtype))
    if mask is None:
        return None
    shape = tuple(mask.shape)
    if shape[-1] == 1 != keys:
        mask = ops.broadcast_to(mask, (*shape[:-1], keys))
    if mask.dtype == bool:
        mask = _plain(mask)
        return xp.concatenate([mask, xp.ones((*mask.shape[:-1], extra), bool)], axis=-1)
    return ops.pad(mask, [*((0, 0) for _ in shape[1:]), (0, extra)])


def explicit(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, scale: float | None = None
             ) -> tuple[Tensor, Tensor]:
    """The same with the weights at hand, which the fused op does not show: (y, weights, after the layer's dropout)."""
    xp = q.xp
    if k.shape[1] != q.shape[1]:
        k, v = (ops.reshape(ops.broadcast_to(ops.expand_dims(a, 2), (*a.shape[:2], q.shape[1] // a.shape[1], *a.shape[2:])),
                            a.shape[0], q.shape[1], *a.shape[2:]) for a in (k, v))
    scores = (q * (1.0 / math.sqrt(q.shape[3]) if scale is None else scale)) @ ops.swapaxes(k, 2, 3)
    allowed = xp.tri(q.shape[2], k.shape[2], dtype=bool) if causal else None
    if mask is not None and mask.dtype == bool:
        mask = _plain(mask)
        allowed = mask if allowed is None else allowed & mask
    elif mask is not None:
        scores = scores + mask
        somewhere = scores.array != -math.inf
        allowed = somewhere if allowed is None else allowed & somewhere
    if allowed is None:
        weights = ops.softmax(scores)
    else:
        lowest = xp.asarray(np.finfo(scores.dtype).min, scores.dtype)       # not -inf: a row may be all of it
        weights = ops.where(allowed, ops.softmax(ops.where(allowed, scores, lowest)), xp.zeros((), scores.dtype))
    dropped: Tensor = layer.dropout(weights)
    return dropped @ v, dropped


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8 i / n) for head i of n, a power of 2; for other numbers the rest comes from between, as in the paper's code."""
    n = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    return slopes + [2 ** (-4 * i / n) for i in range(1, 2 * (heads - n), 2)]
