"""T5, an encoder and a decoder that looks at what it made (Raffel et al. 2020).

Letters: `B` batch, `S` tokens of the source, `L` tokens of the answer, `D` width, `H` heads, `V` vocabulary.

A sample is one row of S + L tokens: the source, and the answer so far (its first token says "begin"). Between blocks goes one
array (B, S + L, D): encoder blocks change its first S positions, decoder blocks the others, and what a block does not change
rides along. So blocks can be cut anywhere. With `padding` it is (B, S + L, D + 1), whose last column is 1 where a position is
padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.models.registry import each_block, require_positive, require_sizes, require_token
from mpitrain.models.transformer import Head
from mpitrain.nn import init
from mpitrain.nn.general_attention import explicit
from mpitrain.nn.init import Initialiser

BUCKETS, FARTHEST = 32, 128                       # of distances: half of them are for 0, 1, ..., the others grow to the farthest
ATTENTION = {"query": "column", "key": "column", "value": "column", "out": "row"}
PLAN = {"embed.token": "vocabulary", "*coder*.attention.relative": "column",
        **{f"*coder*.{kind}.{name}": style for kind in ("attention", "crossing") for name, style in ATTENTION.items()},
        "*coder*.wide": "column", "*coder*.narrow": "row", "head": "vocabulary"}


def std(width: int) -> Initialiser:
    return init.normal(width ** -0.5)


@lru_cache(maxsize=8)
def distances(length: int, both_ways: bool) -> tuple[Any, Any]:
    """(one-hot (2 length - 1, buckets) of the distances key - query from 1 - length on, the distance's number (length, length)).

    `both_ways`: half of the buckets are for keys behind the query.
    """
    gap = np.arange(1 - length, length)
    count = BUCKETS // 2 if both_ways else BUCKETS
    first, far = (np.where(gap > 0, count, 0), np.abs(gap)) if both_ways else (0, -np.minimum(gap, 0))
    exact = count // 2
    with np.errstate(divide="ignore"):
        ratio = np.log(far.astype(np.float32) / exact) / np.float32(math.log(FARTHEST / exact)) * (count - exact)
    large = np.minimum(exact + np.where(far < exact, 0, ratio).astype(np.int64), count - 1)
    places = np.arange(length)
    return np.eye(BUCKETS)[first + np.where(far < exact, far, large)], places[None, :] - places[:, None] + length - 1


class Attention(nn.Module):
    """(B, L, D) and keys (B, S, D) to (B, L, D): softmax(q k' + bias) v, without a scale and without biases of its layers.

    With `relative` there is a number for each head and bucket of distances that is added to the scores: `both_ways`, or of a
    decoder, where a position sees itself and what came before.
    """

    chains = ("query", "out"), ("key", "out"), ("value", "out"), ("relative", "out")

    def __init__(self, width: int, heads: int, head_width: int, dropout: float, relative: bool, causal: bool):
        inner = heads * head_width
        self.heads, self.head_width, self.causal = heads, head_width, causal
        self.query = nn.Linear(width, inner, bias=False, weight_init=std(width * head_width))
        self.key = nn.Linear(width, inner, bias=False, weight_init=std(width))
        self.value = nn.Linear(width, inner, bias=False, weight_init=std(width))
        self.query.out_unit = self.key.out_unit = self.value.out_unit = head_width
        self.relative = nn.Linear(BUCKETS, heads, bias=False, weight_init=std(width)) if relative else None
        self.out = nn.Linear(inner, width, bias=False, weight_init=std(inner))
        self.out.in_unit = head_width
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Any, memory: Any = None, hidden: Any = None) -> Any:
        """`memory` makes keys and values, x by default; nobody looks at those that are `hidden` (B, S)."""
        keys = x if memory is None else memory
        q, k, v = (self._headed(part) for part in (self.query(x), self.key(keys), self.value(keys)))
        mask = self._bias(x)
        if hidden is not None:
            away = ops.astype(ops.where(hidden[:, None, None, :], -math.inf, 0.0), x.dtype)
            mask = away if mask is None else mask + away
        self.dropout.part = self.query.weight.offset[0] // q.shape[1] // self.head_width
        if self.dropout.drops:
            y = explicit(self, q, k, v, mask, self.causal, scale=1.0)[0]
        else:
            y = ops.scaled_dot_product_attention(q, k, v, is_causal=self.causal, attn_mask=mask, scale=1.0,
                                                 operands=self.out.weight.operands)
        return self.out(ops.reshape(ops.swapaxes(y, 1, 2), *x.shape[:2], q.shape[1] * self.head_width))

    def _headed(self, x: Tensor) -> Tensor:
        return ops.swapaxes(ops.reshape(x, *x.shape[:2], x.shape[2] // self.head_width, self.head_width), 1, 2)

    def _bias(self, x: Any) -> Any:
        """What is added to scores (1, H, L, L), of the heads that are here."""
        if self.relative is None:
            return None
        near, which = distances(x.shape[1], not self.causal)
        rows = self.relative(x.xp.asarray(near.astype(x.dtype)))
        return ops.expand_dims(ops.transpose(ops.embedding(x.xp.asarray(which), rows), 2, 0, 1), 0)


class Embed(nn.Module):
    """Token numbers (B, S + L) to their rows (B, S + L, D)."""

    def __init__(self, vocabulary: int, width: int, source: int, dropout: float, padding: int | None):
        self.source, self.padding = source, padding
        self.token = nn.Embedding(vocabulary, width, weight_init=init.normal(1.0))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Any) -> Any:
        shape = tuple(tokens.shape)
        if len(shape) != 2 or shape[1] <= self.source:
            raise ShapeError(f"t5 expects token numbers of shape (batch, {self.source} of the source and those of the answer), "
                             f"got {shape}; set model.source to the length of the sources")
        x = self.dropout(self.token(tokens))
        if self.padding is None:
            return x
        away = ops.expand_dims(ops.equal(tokens, self.padding), -1)
        return ops.concatenate([x, ops.astype(away, x.dtype)], dim=-1)


class _Part(nn.Module):
    """What changes the source's positions, or the answer's: `run` gets these (B, length, D) and all (B, S + L, D)."""

    decodes = False

    def __init__(self, source: int, padded: bool):
        self.source, self.padded = source, padded

    def forward(self, state: Any) -> Any:
        width = state.shape[2] - self.padded
        hidden = ops.not_equal(state[:, :self.source, -1], 0) if self.padded else None
        source, answer = state[:, :self.source], state[:, self.source:]
        mine = answer if self.decodes else source
        changed = self.run(mine[..., :width] if self.padded else mine, source[..., :width] if self.padded else source, hidden)
        if self.padded:
            changed = ops.concatenate([changed, mine[..., width:]], dim=-1)
        return ops.concatenate([source, changed] if self.decodes else [changed, answer], dim=1)

    def run(self, x: Any, memory: Any, hidden: Any) -> Any:
        raise NotImplementedError


class EncoderBlock(_Part):
    """x + attention(norm(x)), then x + mlp(norm(x)), for the source."""

    chains: Sequence[Sequence[str]] = (("wide", "dropped", "narrow"),)

    def __init__(self, width: int, heads: int, head_width: int, hidden: int, dropout: float, eps: float, source: int,
                 padded: bool):
        super().__init__(source, padded)
        self.norm1 = nn.RMSNorm(width, eps)
        self.attention = Attention(width, heads, head_width, dropout, relative=True, causal=self.decodes)
        self.dropout1 = nn.DropoutAdd(dropout)
        if self.decodes:
            self.norm2 = nn.RMSNorm(width, eps)
            self.crossing = Attention(width, heads, head_width, dropout, relative=False, causal=False)
            self.dropout2 = nn.DropoutAdd(dropout)
        self.norm3 = nn.RMSNorm(width, eps)
        self.wide = nn.Linear(width, hidden, bias=False, activation="relu", weight_init=std(width))
        self.dropped = nn.Dropout(dropout)
        self.narrow = nn.Linear(hidden, width, bias=False, weight_init=std(hidden))
        self.dropout3 = nn.DropoutAdd(dropout)

    def run(self, x: Any, memory: Any, hidden: Any) -> Any:
        y = self.norm1(x)
        x = self.dropout1(self.attention(y) if self.decodes else self.attention(y, hidden=hidden), x)
        if self.decodes:
            x = self.dropout2(self.crossing(self.norm2(x), memory, hidden), x)
        return self.dropout3(self.narrow(self.dropped(self.wide(self.norm3(x)))), x)


class DecoderBlock(EncoderBlock):
    """The same for the answer, of which a position sees what came before, with attention to the source between."""

    decodes = True


class SourceNorm(_Part):
    """The norm of the encoded source."""

    def __init__(self, width: int, dropout: float, eps: float, source: int, padded: bool):
        super().__init__(source, padded)
        self.norm, self.dropout = nn.RMSNorm(width, eps), nn.Dropout(dropout)

    def run(self, x: Any, memory: Any, hidden: Any) -> Any:
        return self.dropout(self.norm(x))


class Answer(nn.Module):
    """(B, S + L, D) to the norm of the answer's positions (B, L, D), times `scale`."""

    def __init__(self, width: int, dropout: float, eps: float, source: int, scale: float):
        self.width, self.source, self.scale = width, source, scale
        self.norm, self.dropout = nn.RMSNorm(width, eps), nn.Dropout(dropout)

    def forward(self, state: Any) -> Any:
        y = self.dropout(self.norm(state[:, self.source:, :self.width]))
        return y if self.scale == 1.0 else y * self.scale


def t5(layers: int = 6, heads: int = 8, width: int = 512, head_width: int = 64, hidden: int | Sequence[int] = 2048,
       source: int = 512, block: int = 568, vocabulary: int = 32128, dropout: float = 0.1, eps: float = 1e-6, tied: bool = True,
       padding: int | None = None) -> nn.Sequential:
    """T5 of `layers` encoder and as many decoder blocks; with its defaults T5-small.

    The first `source` tokens of a sample are what the encoder reads, the others what the decoder has said; logits are of what it
    says next. `block` is the window of the text that samples are made of (data.augment = ["spans"]). The head has the embedding's
    weight unless `tied` is false. Tokens `padding` of the source are no text.
    """
    require_sizes(layers=layers, heads=heads, width=width, head_width=head_width, source=source, block=block,
                  vocabulary=vocabulary)
    require_positive(eps=eps)
    require_token(vocabulary, padding=padding)
    n_hidden, padded = each_block("hidden", hidden, layers), padding is not None
    embed = Embed(vocabulary, width, source, dropout, padding)
    stacks: list[list[EncoderBlock]] = []
    for kind in (EncoderBlock, DecoderBlock):
        stack = [kind(width, heads, head_width, n_hidden[i], dropout, eps, source, padded) for i in range(layers)]
        for block_ in stack[1:]:                  # one table of distances for all blocks of a stack
            assert block_.attention.relative is not None and stack[0].attention.relative is not None
            block_.attention.relative.weight = stack[0].attention.relative.weight
        stacks.append(stack)
    weight = embed.token.weight if tied else nn.Parameter((vocabulary, width), init.normal(1.0))
    model = nn.Sequential(
        ("embed", embed), *((f"encoder{i}", one) for i, one in enumerate(stacks[0])),
        ("encoder_norm", SourceNorm(width, dropout, eps, source, padded)),
        *((f"decoder{i}", one) for i, one in enumerate(stacks[1])),
        ("norm", Answer(width, dropout, eps, source, width ** -0.5 if tied else 1.0)), ("head", Head(weight)))
    model.plan = PLAN if not dropout else {**PLAN, "*coder*.dropped": "channels"}
    return model
