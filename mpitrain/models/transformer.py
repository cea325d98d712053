"""A decoder-only transformer: GPT-2's, as Karpathy's nanoGPT trains it.

Letters: `B` batch, `L` length, `D` width, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain import nn
from mpitrain.autograd import Tensor
from mpitrain.backend import constant
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.models.registry import MODELS, each_block, require_positive, require_sizes
from mpitrain.nn import init

STD = 0.02                                        # The standard deviation of initial weights, as GPT-2 has it.
PLAN = {"embed.token": "vocabulary", "embed.position": "sequence", "embed.dropout": "sequence",
        "block*.norm1": "sequence", "block*.attention.qkv": "column", "block*.attention.out": "row",
        "block*.dropout1": "sequence", "block*.norm2": "sequence", "block*.wide": "column", "block*.narrow": "row",
        "block*.dropout2": "sequence",
        "norm": "sequence", "head": "vocabulary"}
MLP = ("block*.wide", "block*.narrow")            # Blocks with experts have no such layers, and the plan leaves them out.


class Embed(nn.Module):
    """Token numbers (B, L) to (B, L, D): the token's row plus the position's."""

    by_position = True

    def __init__(self, vocabulary: int, block: int, width: int, dropout: float):
        self.block = block
        self.token = nn.Embedding(vocabulary, width, weight_init=init.normal(STD))
        self.position = nn.Embedding(block, width, weight_init=init.normal(STD))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Any) -> Tensor:
        shape = tuple(tokens.shape)
        if len(shape) != 2 or shape[1] > self.block:
            raise ShapeError(f"gpt expects token numbers of shape (batch, at most {self.block}), got {shape}; "
                             "set model.block to the length of the samples")
        places = constant(self.token.weight.xp, self.positions(shape[1]))
        out: Tensor = self.dropout(self.token(tokens) + self.position(places))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); (B, L, D) to (B, L, D).

    The projections back into the residual stream start smaller, by sqrt(2 x layers) (Radford et al. 2019). The MLP is `hidden`
    wide inside, or a mixture of experts where there are arguments for one in `mixture`.
    """

    by_position = True
    chains = ("wide", "narrow"),
    mixture: nn.MixtureOfExperts | None = None

    def __init__(self, width: int, heads: int, head_width: int, hidden: int, layers: int, dropout: float, bias: bool,
                 mixture: Mapping[str, Any], activation: str = "gelu", eps: float = 1e-5):
        small = init.normal(STD / math.sqrt(2 * layers))
        self.norm1 = nn.LayerNorm(width, eps, bias)
        self.attention = nn.MultiHeadAttention(width, heads, causal=True, dropout=dropout, bias=bias,
                                               qkv_init=init.normal(STD), out_init=small, head_width=head_width)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, eps, bias)
        if mixture:
            self.mixture = nn.MixtureOfExperts(width, hidden, bias=bias, activation=activation, weight_init=init.normal(STD),
                                               out_init=small, router_init=init.normal(STD), **mixture)
        else:
            self.wide = nn.Linear(width, hidden, bias, activation=activation, weight_init=init.normal(STD),
                                  bias_init=init.zeros)
            self.narrow = nn.Linear(hidden, width, bias, weight_init=small, bias_init=init.zeros)
        self.dropout2 = nn.DropoutAdd(dropout)

    def forward(self, x: Any) -> Tensor:
        x, normed = self.norm2(self.attention(self.norm1(x)), x, self.dropout1)
        out: Tensor = self.dropout2(self.narrow(self.wide(normed)) if self.mixture is None else self.mixture(normed), x)
        return out


class Head(nn.Linear):
    """(B, L, D) to logits (B, L, V), with the token embedding as its weight (Press and Wolf 2017), or one of its own."""

    def __init__(self, weight: nn.Parameter):
        self.fused = self.after = self.bias = None
        self.weight = weight


@MODELS.register("gpt")
def gpt(layers: int, heads: int | Sequence[int], width: int, block: int, vocabulary: int, dropout: float = 0.0,
        bias: bool = False, experts: int = 0, top_k: int = 2, capacity: float = 1.25, balance: float = 0.01, every: int = 1,
        activation: str = "gelu", tied: bool = True, eps: float = 1e-5, head_width: int | None = None,
        hidden: int | Sequence[int] | None = None) -> nn.Sequential:
    """Learned positions, pre-norm blocks, GELU, tied embeddings; `block` is the longest sequence it takes.

    GPT-2's own has `bias`, and "gelu_tanh" as `activation`. Unless `tied`, the head has a weight of its own. `eps` is the norms'.
    With `experts`, the MLP of each `every`-th block is a mixture of so many: see `nn.MixtureOfExperts`. `heads` and `hidden`
    (the width inside of an MLP, 4 times `width` by default) are a number, or one for each block; `head_width` is width / heads
    by default.
    """
    require_sizes(layers=layers, width=width, block=block, vocabulary=vocabulary, top_k=top_k, every=every)
    require_sizes(0, experts=experts)
    n_heads, n_hidden = each_block("heads", heads, layers), each_block("hidden", 4 * width if hidden is None else hidden, layers)
    if head_width is None:
        if len(set(n_heads)) > 1 or width % n_heads[0]:
            raise ShapeError(f"a width of {width} cannot be cut into {heads} heads; width must be a multiple of heads, or set "
                             "model.head_width")
        head_width = width // n_heads[0]
    require_sizes(head_width=head_width)
    if experts and every > layers:
        raise ConfigError(f"gpt: with model.every = {every}, none of {layers} blocks has experts; set it to {layers} at most")
    require_positive(eps=eps)
    embed = Embed(vocabulary, block, width, dropout)
    weight = embed.token.weight if tied else nn.Parameter((vocabulary, width), init.normal(STD))
    mixture = {"experts": experts, "top_k": top_k, "capacity": capacity, "balance": balance} if experts else {}
    model = nn.Sequential(
        ("embed", embed),
        *((f"block{i}", Block(width, n_heads[i], head_width, n_hidden[i], layers, dropout, bias,
                              {} if (i + 1) % every else mixture, activation, eps))
          for i in range(layers)),
        ("norm", nn.LayerNorm(width, eps, bias)),
        ("head", Head(weight)))
    model.plan = PLAN if not experts or every > 1 else {name: style for name, style in PLAN.items() if name not in MLP}
    model.size_keys = {"heads": [f"block{i}.attention.qkv" for i in range(layers)]}
    if not experts:
        model.size_keys["hidden"] = [f"block{i}.wide" for i in range(layers)]
    model.sized_with = {"head_width": head_width}
    return model
