"""Multi-head attention (Vaswani et al. 2017). Letters: `B` batch, `L` length, `S` length of the keys, `D` width, `H` heads."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.nn import init
from mpitrain.nn.basic import Dropout, Linear
from mpitrain.nn.init import Initialiser
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter

__all__ = ["MultiHeadAttention"]


def _base(rope: float | bool | None, alibi: bool) -> float | None:
    """The base of the turns that `rope` asks for; None: there are none."""
    if rope is None or rope is False:
        return None
    if isinstance(rope, str) or not isinstance(rope, Real) or not 0 < rope < math.inf:
        raise ShapeError(f"MultiHeadAttention: rope is {rope!r}, expected True or a base above 0, such as 10000.0")
    if alibi:
        raise ShapeError("MultiHeadAttention: rope and alibi are two ways to tell positions; set one of them")
    return 10000.0 if rope is True else float(rope)


class MultiHeadAttention(Module):
    """(B, L, D) to (B, L, D), or (L, D) to (L, D). One weight makes queries, keys and values: rows [q; k; v], as PyTorch's
    in_proj_weight.

    A head is `head_width` wide, D / heads by default: heads that are cut out of a layer leave D as it is. `causal`: a position
    sees itself and what came before. `dropout` acts on the attention weights. Where `qkv` and `out` are cut over ranks, each rank
    has some of the heads, and the same of them in the queries, the keys and the values.

    With `key_width` or `value_width`, the widths of other inputs for keys and values, or with `key_heads` fewer heads for these,
    each for as many neighbouring heads of the queries (Ainslie et al. 2023), there are three weights, `query`, `key` and `value`.
    `rope` turns queries and keys by their positions: the base of `ops.rotary_embedding`; True is 10000, as in the paper.
    `alibi` instead lowers the scores of far keys, by a slope for each head (Press et al. 2021). `bias_kv` adds a trained key and
    value to each sample's, `zero_attention` ones of zeros.
    """

    chains = ("qkv", "out"), ("query", "out"), ("key", "out"), ("value", "out")      # heads, each by itself
    by_position = True                                # as the rest of a model sees it: where positions are cut, `across` knows

    def __init__(self, width: int, heads: int, *, causal: bool = False, dropout: float = 0.0, bias: bool = True,
                 qkv_init: Initialiser | None = None, out_init: Initialiser = init.default_weight, key_width: int | None = None,
                 value_width: int | None = None, key_heads: int | None = None, rope: float | bool | None = None,
                 alibi: bool = False, bias_kv: bool = False, zero_attention: bool = False, head_width: int | None = None):
        if heads < 1 or head_width is None and width % heads:
            raise ShapeError(f"a width of {width} cannot be cut into {heads} heads; width must be a multiple of heads")
        if head_width is not None and head_width < 1:
            raise ShapeError(f"MultiHeadAttention: head_width is {head_width}, expected 1 or more")
        self.heads, self.head_width, self.causal = heads, width // heads if head_width is None else head_width, causal
        inner = heads * self.head_width
        self.key_heads = heads if key_heads is None else key_heads
        if self.key_heads < 1 or heads % self.key_heads:
            raise ShapeError(f"{heads} heads of queries cannot share {self.key_heads} of keys; heads must be a multiple of it")
        self.rope, self.alibi, self.zero_attention = _base(rope, alibi), alibi, zero_attention
        first = qkv_init or init.xavier_uniform()
        widths = (width if key_width is None else key_width, width if value_width is None else value_width)
        self.joint = widths == (width, width) and self.key_heads == heads
        if self.joint:
            self.qkv = Linear(width, 3 * inner, bias, weight_init=first, bias_init=init.zeros)
            self.qkv.out_groups, self.qkv.out_unit = 3, self.head_width
        else:
            outputs = self.key_heads * self.head_width
            self.query = Linear(width, inner, bias, weight_init=first, bias_init=init.zeros)
            self.key = Linear(widths[0], outputs, bias, weight_init=first, bias_init=init.zeros)
            self.value = Linear(widths[1], outputs, bias, weight_init=first, bias_init=init.zeros)
            self.query.out_unit = self.key.out_unit = self.value.out_unit = self.head_width
        self.out = Linear(inner, width, bias, weight_init=out_init, bias_init=init.zeros)
        self.out.in_unit = self.head_width
        self.dropout = Dropout(dropout)
        shape = (1, 1, self.key_heads * self.head_width)
        self.bias_k, self.bias_v = (Parameter(shape, init.normal(0.02)) if bias_kv else None for _ in range(2))
        ordinary = not (alibi or bias_kv or zero_attention)
        self.plain, self.grouped = self.joint and ordinary, not self.joint and ordinary and widths == (width, width)

    def forward(self, x: Any, mask: Any = None, key: Any = None, value: Any = None, key_padding_mask: Any = None,
                need_weights: bool = False, is_causal: bool = False) -> Any:
        """Queries are made of x, keys and values of `key` (B, S, ...), x by default, and `value`, which is `key` by default.

        `mask` broadcasts to (B, H, L, S): True where a position may look, or numbers added to the scores. `key_padding_mask`
        (B, S) is True where a key is padding that nobody looks at, as PyTorch's is, or numbers added to the scores. With
        `need_weights` the result is (y, the weights (B, H, L, S)). A query that may look nowhere gets zeros. `is_causal` is
        `causal` for this call.
        """
        causal = self.causal or is_causal
        if not (self.plain and key is None and value is None and key_padding_mask is None) or need_weights or len(x.shape) != 3:
            from mpitrain.nn.general_attention import attend as general  # most models do without
            return general(self, x, mask, key, value, key_padding_mask, need_weights, causal)
        qkv, dropping = self.qkv(x), self.dropout.drops
        batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        heads = width // self.head_width                                        # here
        self.dropout.part = self.qkv.weight.offset[0] // width
        if mask is None:
            if self.rope is not None:
                qkv = self.turned(qkv, heads)
            attend = ops.self_attention if self.across is None else self.across.attend
            y = attend(qkv, heads, causal=causal, dropout=self.dropout.p if dropping else 0.0, layer=self.dropout.path,
                       part=self.dropout.part, operands=self.qkv.weight.operands)
        else:
            mask = self.here(mask, heads)
            q, k, v = (ops.swapaxes(ops.reshape(part, batch, length, heads, self.head_width), 1, 2)
                       for part in ops.split(qkv, width, dim=-1))
            if self.rope is not None:
                q, k = self.turn(q), self.turn(k)
            if dropping:
                from mpitrain.nn.general_attention import explicit
                y = explicit(self, q, k, v, mask, causal)[0]
            else:
                y = ops.scaled_dot_product_attention(q, k, v, is_causal=causal, attn_mask=mask)
            y = ops.reshape(ops.swapaxes(y, 1, 2), batch, length, width)
        return self.out(y)

    def resized(self) -> None:
        if self.joint:
            self.heads = self.key_heads = self.qkv.weight.global_shape[0] // (3 * self.head_width)

    def turn(self, x: Tensor) -> Tensor:
        places = self.positions(x.shape[2])
        places = places if places.ndim == 1 else places[:, None]                  # (B, L): each row is somewhere else in its text
        return ops.rotary_embedding(x, places, base=self.rope)

    def turned(self, qkv: Tensor, heads: int) -> Tensor:
        """qkv with its queries and keys turned by their positions."""
        batch, length, width = qkv.shape
        parts = ops.reshape(qkv, batch, length, 3, heads, self.head_width)
        places = self.positions(length)
        places = places if places.ndim == 1 else places[:, None, None]            # (B, L): each row is somewhere else in its text
        turned = ops.rotary_embedding(ops.transpose(parts[:, :, :2], 0, 2, 3, 1, 4), places, base=self.rope)
        joined = ops.concatenate([ops.transpose(turned, 0, 3, 1, 2, 4), parts[:, :, 2:]], dim=2)
        return ops.reshape(joined, batch, length, width)

    def here(self, mask: Any, heads: int) -> Any:
        """The part of the mask for the heads that are here."""
        if heads < self.heads == (mask.shape[-3] if len(mask.shape) > 2 else 1):
            mask = mask[..., self.dropout.part * heads:(self.dropout.part + 1) * heads, :, :]
        return mask
