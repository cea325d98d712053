"""Multi-head self-attention (Vaswani et al. 2017). Letters: `B` batch, `L` length, `D` width, `H` heads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.nn import init
from mpitrain.nn.basic import Dropout, Linear
from mpitrain.nn.init import Initialiser
from mpitrain.nn.module import Module

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(Module):
    """(B, L, D) to (B, L, D). One weight makes queries, keys and values: rows [q; k; v], as PyTorch's in_proj_weight.

    `causal`: a position sees itself and what came before. `dropout` acts on the attention weights. Where `qkv` and `out` are cut
    over ranks, each rank has some of the heads, and the same of them in the queries, the keys and the values.
    """

    by_position = True                                # as the rest of a model sees it: where positions are cut, `across` knows

    def __init__(self, width: int, heads: int, *, causal: bool = False, dropout: float = 0.0, bias: bool = True,
                 qkv_init: Initialiser | None = None, out_init: Initialiser = init.default_weight):
        if heads < 1 or width % heads:
            raise ShapeError(f"a width of {width} cannot be cut into {heads} heads; width must be a multiple of heads")
        self.heads, self.head_width, self.causal = heads, width // heads, causal
        self.qkv = Linear(width, 3 * width, bias, weight_init=qkv_init or init.xavier_uniform(), bias_init=init.zeros)
        self.out = Linear(width, width, bias, weight_init=out_init, bias_init=init.zeros)
        self.dropout = Dropout(dropout)
        self.qkv.out_groups, self.qkv.out_unit, self.out.in_unit = 3, self.head_width, self.head_width

    def forward(self, x: Any, mask: Any = None) -> Tensor:
        """`mask` broadcasts to (B, H, L, L): True where a position may look, or numbers added to the scores."""
        qkv, dropping = self.qkv(x), self.dropout.drops
        batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        heads = width // self.head_width                                        # here
        self.dropout.part = self.qkv.weight.offset[0] // width
        if mask is None:
            attend = ops.self_attention if self.across is None else self.across.attend
            y = attend(qkv, heads, causal=self.causal, dropout=self.dropout.p if dropping else 0.0, layer=self.dropout.path,
                       part=self.dropout.part)
        else:
            if heads < self.heads == (mask.shape[-3] if len(mask.shape) > 2 else 1):
                mask = mask[..., self.dropout.part * heads:(self.dropout.part + 1) * heads, :, :]
            q, k, v = (ops.swapaxes(ops.reshape(part, batch, length, heads, self.head_width), 1, 2)
                       for part in ops.split(qkv, width, dim=-1))
            y = (self._with_dropout(q, k, v, mask) if dropping
                 else ops.scaled_dot_product_attention(q, k, v, causal=self.causal, mask=mask))
            y = ops.reshape(ops.swapaxes(y, 1, 2), batch, length, width)
        return self.out(y)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """The same with a mask, with the weights at hand, which the fused op does not show."""
        xp = q.xp
        scores = (q * (1.0 / math.sqrt(q.shape[3]))) @ ops.swapaxes(k, 2, 3)
        allowed = xp.tri(q.shape[2], dtype=bool) if self.causal else None
        if mask.dtype == bool:
            allowed = mask if allowed is None else allowed & mask
        else:
            scores = scores + mask
        if allowed is None:
            weights = ops.softmax(scores)
        else:
            lowest = xp.asarray(np.finfo(scores.dtype).min, scores.dtype)       # not -inf: a row may be all of it
            weights = ops.where(allowed, ops.softmax(ops.where(allowed, scores, lowest)), xp.zeros((), scores.dtype))
        dropped: Tensor = self.dropout(weights)
        return dropped @ v
