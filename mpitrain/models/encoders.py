"""Encoders of text that see all positions at once: BERT (Devlin et al. 2019) and DistilBERT (Sanh et al. 2019).

Letters: `B` batch, `L` length, `D` width, `V` vocabulary. Token numbers say all that a model wants to know of a text: where it is
padded, and where its second part begins. Between blocks goes x (B, L, D), or with `padding` (B, L, D + 1), whose last column is 1
where a position is padding: so blocks can be cut anywhere, and no rank asks another for the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain import nn, ops
from mpitrain.backend import constant
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.models.registry import each_block, require_positive, require_sizes, require_token
from mpitrain.nn import init

STD = 0.02                                        # The standard deviation of initial weights, as BERT has it.
INITIAL: dict[str, Any] = {"weight_init": init.normal(STD), "bias_init": init.zeros}
PLAN = {"embed.token": "vocabulary", "block*.attention.qkv": "column", "block*.attention.out": "row", "block*.wide": "column",
        "block*.narrow": "row"}
HEADS = ("masked", "pooled", "classes", "none")


class Embed(nn.Module):
    """Token numbers (B, L) to (B, L, D): the norm of the sum of the rows of the token, its position and its part of the text.

    With `separator`, the positions behind the first token of this number are of the second part; else all are of the first. With
    `padding`, tokens of this number are no text.
    """

    def __init__(self, vocabulary: int, block: int, width: int, types: int, dropout: float, eps: float, padding: int | None,
                 separator: int | None):
        self.block, self.padding, self.separator = block, padding, separator
        self.by_position = padding is None and separator is None
        self.token = nn.Embedding(vocabulary, width, padding_idx=padding, weight_init=init.normal(STD))
        self.position = nn.Embedding(block, width, weight_init=init.normal(STD))
        self.type = nn.Embedding(types, width, weight_init=init.normal(STD)) if types else None
        self.norm = nn.LayerNorm(width, eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Any) -> Any:
        shape = tuple(tokens.shape)
        if len(shape) != 2 or shape[1] > self.block:
            raise ShapeError(f"the model expects token numbers of shape (batch, at most {self.block}), got {shape}; set "
                             "model.block to the length of the samples")
        xp = self.token.weight.xp
        x = self.token(tokens) + self.position(constant(xp, self.positions(shape[1])))
        if self.type is not None:
            x = x + self.type(self.parts(tokens, xp))
        x = self.dropout(self.norm(x))
        if self.padding is None:
            return x
        away = ops.expand_dims(ops.equal(tokens, self.padding), -1)
        return ops.concatenate([x, ops.astype(away, x.dtype)], dim=-1)

    def parts(self, tokens: Any, xp: Any) -> Any:
        """0 for a token of the first part, 1 for one of the second (B, L), or (1, 1) of all; padding is of the first."""
        if self.separator is None:
            return xp.zeros((1, 1), np.int64)
        ends = ops.astype(ops.equal(tokens, self.separator), "int64")
        second = ops.greater(ops.cumsum(ends, 1) - ends, 0)
        if self.padding is not None:
            second = ops.logical_and(second, ops.not_equal(tokens, self.padding))
        return ops.astype(second, "int64")


class Block(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x)); (B, L, D) to (B, L, D), as the paper has it: norms come last."""

    by_position = True
    chains = ("wide", "narrow"),

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, activation: str, eps: float, padded: bool):
        self.padded = padded
        weights = init.normal(STD)
        self.attention = nn.MultiHeadAttention(width, heads, dropout=dropout, qkv_init=weights, out_init=weights)
        self.dropout1 = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(width, eps)
        self.wide = nn.Linear(width, hidden, activation=activation, **INITIAL)
        self.narrow = nn.Linear(hidden, width, **INITIAL)
        self.dropout2 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, eps)

    def forward(self, x: Any) -> Any:
        if not self.padded:
            return self.run(x, None)
        hidden = ops.not_equal(x[..., -1], 0)
        return ops.concatenate([self.run(x[..., :-1], hidden), x[..., -1:]], dim=-1)

    def run(self, x: Any, hidden: Any) -> Any:
        """x (B, L, D) after the block; nobody looks at positions that are `hidden` (B, L)."""
        x = self.norm1(self.attention(x, key_padding_mask=hidden), x, self.dropout1)[1]
        return self.norm2(self.narrow(self.wide(x)), x, self.dropout2)[1]


class Text(nn.Module):
    """x (B, L, D) of (B, L, D + 1): the column that tells padding is left out."""

    by_position = True

    def forward(self, x: Any) -> Any:
        return x[..., :-1]


class Transform(nn.Module):
    """norm(activation(linear(x))) of each position: what comes before the logits of masked tokens."""

    by_position = True

    def __init__(self, width: int, activation: str, eps: float):
        self.linear = nn.Linear(width, width, activation=activation, **INITIAL)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, x: Any) -> Any:
        return self.norm(self.linear(x))


class First(nn.Module):
    """The first position (B, D) of (B, L, D), through a linear layer and an activation."""

    def __init__(self, width: int, activation: str):
        self.linear = nn.Linear(width, width, activation=activation, **INITIAL)

    def forward(self, x: Any) -> Any:
        return self.linear(x[:, 0])


class Head(nn.Linear):
    """(B, L, D) to logits (B, L, V), with the token embedding as its weight and a bias of its own."""

    def __init__(self, weight: nn.Parameter):
        self.fused = self.after = None
        self.weight = weight
        self.bias = nn.Parameter((weight.global_shape[0],), init.zeros)


def _encoder(layers: int, heads: int, width: int, hidden: int | Sequence[int], block: int, vocabulary: int, types: int,
             dropout: float, activation: str, eps: float, head: str, classes: int | None, padding: int | None,
             separator: int | None, pooled: str, head_dropout: float) -> nn.Sequential:
    """The blocks of both models; `pooled` is the activation behind the linear layer for the first position."""
    require_sizes(layers=layers, heads=heads, width=width, block=block, vocabulary=vocabulary)
    require_positive(eps=eps)
    n_hidden = each_block("hidden", hidden, layers)
    require_token(vocabulary, padding=padding, separator=separator)
    if head not in HEADS:
        raise ConfigError(f'model.head must be one of {", ".join(HEADS)}, found "{head}"; change model.head')
    if (classes is not None) != (head == "classes"):
        raise ConfigError(f'model.head = "{head}" and model.classes = {classes}: "classes" wants a number of classes, and others '
                          "have none; change one of them")
    embed = Embed(vocabulary, block, width, types, dropout, eps, padding, separator)
    blocks: list[tuple[str, nn.Module]] = [("embed", embed)]
    blocks += [(f"block{i}", Block(width, heads, inner, dropout, activation, eps, padding is not None))
               for i, inner in enumerate(n_hidden)]
    blocks += [("text", Text())] if padding is not None else []
    if head == "masked":
        blocks += [("transform", Transform(width, activation, eps)), ("head", Head(embed.token.weight))]
    elif head != "none":
        blocks.append(("first", First(width, pooled)))
    if classes is not None:
        require_sizes(classes=classes)
        blocks += [("dropout", nn.Dropout(head_dropout)), ("head", nn.Linear(width, classes, **INITIAL))]
    model = nn.Sequential(*blocks)
    model.plan = {**PLAN, "head": "vocabulary"} if head == "masked" else PLAN
    model.size_keys = {"hidden": [f"block{i}.wide" for i in range(layers)]}
    return model


def bert(layers: int = 12, heads: int = 12, width: int = 768, hidden: int | Sequence[int] = 3072, block: int = 512,
         vocabulary: int = 30522, types: int = 2, dropout: float = 0.1, activation: str = "gelu", eps: float = 1e-12,
         head: str = "masked", classes: int | None = None, padding: int | None = None, separator: int | None = None
         ) -> nn.Sequential:
    """BERT; with its defaults BERT-base. Learned positions, norms behind each residual, GELU.

    `head` says what comes out: "masked" logits of every position's token, with the embedding's weight; "pooled" the first
    position through tanh; "classes" logits of so many `classes` of that; "none" every position's numbers. Tokens `padding` are
    no text. Positions behind the first token `separator` are of the second of two texts, else all are of the first; `types` are
    the rows of the table that tells these apart.
    """
    require_sizes(types=types)
    if separator is not None and types < 2:
        raise ConfigError(f"model.separator tells two parts of a text apart, and model.types is {types}; set it to 2")
    return _encoder(layers, heads, width, hidden, block, vocabulary, types, dropout, activation, eps, head, classes,
                    padding, separator, "tanh", dropout)


def distilbert(layers: int = 6, heads: int = 12, width: int = 768, hidden: int | Sequence[int] = 3072, block: int = 512,
               vocabulary: int = 30522, dropout: float = 0.1, activation: str = "gelu", eps: float = 1e-12, head: str = "masked",
               classes: int | None = None, padding: int | None = None) -> nn.Sequential:
    """DistilBERT: half of BERT's blocks, and no parts of a text. The keys are those of `bert`; "pooled" is through ReLU."""
    return _encoder(layers, heads, width, hidden, block, vocabulary, 0, dropout, activation, eps, head, classes,
                    padding, None, "relu", 0.2)
