"""A decoder as LLaMA has it (Touvron et al. 2023): turned positions, norms without means, gated MLPs, few heads for keys.

Letters: `B` batch, `L` length, `D` width, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain import nn
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.models.registry import each_block, require_positive, require_sizes
from mpitrain.models.transformer import Head
from mpitrain.nn import init

STD = 0.02                                        # The standard deviation of initial weights.
PLAN = {"embed.token": "vocabulary", "block*.norm1": "sequence", "block*.attention.out": "row", "block*.norm2": "sequence",
        "block*.gate": "column", "block*.up": "column", "block*.down": "row", "norm": "sequence", "head": "vocabulary"}
JOINT = {"block*.attention.qkv": "column"}        # as many heads for keys as for queries: one weight makes all three
GROUPED = {f"block*.attention.{name}": "column" for name in ("query", "key", "value")}


class Embed(nn.Module):
    """Token numbers (B, L) to their rows (B, L, D)."""

    by_position = True

    def __init__(self, vocabulary: int, block: int, width: int):
        self.block = block
        self.token = nn.Embedding(vocabulary, width, weight_init=init.normal(STD))

    def forward(self, tokens: Any) -> Any:
        shape = tuple(tokens.shape)
        if len(shape) != 2 or shape[1] > self.block:
            raise ShapeError(f"llama expects token numbers of shape (batch, at most {self.block}), got {shape}; set model.block "
                             "to the length of the samples")
        return self.token(tokens)


class Block(nn.Module):
    """x + attention(norm(x)), then x + down(silu(gate(norm(x))) up(norm(x))) (SwiGLU, Shazeer 2020); (B, L, D) to (B, L, D)."""

    by_position = True
    chains = ("gate", "down"), ("up", "down")

    def __init__(self, width: int, heads: int, key_heads: int, head_width: int, hidden: int, rope: float, eps: float):
        weights = init.normal(STD)
        self.norm1 = nn.RMSNorm(width, eps)
        self.attention = nn.MultiHeadAttention(width, heads, causal=True, bias=False, key_heads=key_heads, rope=rope,
                                               head_width=head_width, qkv_init=weights, out_init=weights)
        self.norm2 = nn.RMSNorm(width, eps)
        self.gate = nn.Linear(width, hidden, bias=False, activation="silu", weight_init=weights)
        self.up = nn.Linear(width, hidden, bias=False, weight_init=weights)
        self.down = nn.Linear(hidden, width, bias=False, weight_init=weights)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(self.gate(y) * self.up(y))


def llama(layers: int, heads: int, width: int, block: int, vocabulary: int, key_heads: int | None = None,
          hidden: int | Sequence[int] | None = None, rope: float = 10000.0, eps: float = 1e-5, tied: bool = False,
          head_width: int | None = None) -> nn.Sequential:
    """Pre-norm blocks without biases and dropout; `block` is the longest sequence it takes.

    The queries have `heads` heads, keys and values `key_heads`, each for as many neighbouring ones (`heads` by default).
    `hidden` is the width inside of the MLPs, a number or one for each block: by default 8/3 of `width`, up to a multiple of
    256, as the paper has it.
    `rope` is the base of the turns. `tied`: the head has the embedding's weight. `head_width` is width / heads by default.
    """
    require_sizes(layers=layers, heads=heads, width=width, block=block, vocabulary=vocabulary)
    for_keys = heads if key_heads is None else key_heads
    require_sizes(key_heads=for_keys)
    require_positive(rope=rope, eps=eps)
    if heads % for_keys:
        raise ConfigError(f"model.heads = {heads} cannot share model.key_heads = {for_keys}; heads must be a multiple of "
                          "key_heads")
    if head_width is None and width % heads:
        raise ShapeError(f"a width of {width} cannot be cut into {heads} heads; width must be a multiple of heads, or set "
                         "model.head_width")
    of_head = width // heads if head_width is None else head_width
    require_sizes(head_width=of_head)
    if of_head % 2:
        raise ConfigError(f"llama turns pairs of numbers, and a head is {of_head} wide; make model.width / model.heads, or "
                          "model.head_width, an even number")
    n_hidden = each_block("hidden", -(-8 * width // 768) * 256 if hidden is None else hidden, layers)
    embed = Embed(vocabulary, block, width)
    weight = embed.token.weight if tied else nn.Parameter((vocabulary, width), init.normal(STD))
    model = nn.Sequential(
        ("embed", embed),
        *((f"block{i}", Block(width, heads, for_keys, of_head, n_hidden[i], rope, eps)) for i in range(layers)),
        ("norm", nn.RMSNorm(width, eps)), ("head", Head(weight)))
    model.plan = PLAN | (JOINT if for_keys == heads else GROUPED)
    model.size_keys = {"hidden": [f"block{i}.gate" for i in range(layers)]}
    return model
