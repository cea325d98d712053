"""Transformer layers and stacks of them, encoder and decoder (Vaswani et al. 2017). Letters: `B` batch, `L` length, `D` width.

Names, order and shapes of parameters are PyTorch's, but for `qkv` and `out` in attention. Masks are those of
`MultiHeadAttention`: `mask` is True where a position may look, a key padding mask is True where a key is padding.
"""

from __future__ import annotations

import copy
from typing import Any

from mpitrain.errors import ShapeError
from mpitrain.nn import init
from mpitrain.nn.attention import MultiHeadAttention
from mpitrain.nn.basic import Dropout, Linear
from mpitrain.nn.init import Initialiser
from mpitrain.nn.module import Module
from mpitrain.nn.norm import LayerNorm
from mpitrain.nn.parameter import Described

__all__ = ["Transformer", "TransformerDecoder", "TransformerDecoderLayer", "TransformerEncoder", "TransformerEncoderLayer"]

NETWORK = "linear1", "dropout", "linear2"


class _Layer(Module):
    """Attention and a feed-forward network of `hidden` numbers, each with a residual and a norm, after it or `norm_first`."""

    crossing = False                              # whether there is attention to a memory

    def __init__(self, width: int, heads: int, hidden: int = 2048, dropout: float = 0.1, activation: str = "relu",
                 eps: float = 1e-5, norm_first: bool = False, bias: bool = True, *, causal: bool = False,
                 weight_init: Initialiser = init.default_weight):
        def attention(causal: bool) -> MultiHeadAttention:
            return MultiHeadAttention(width, heads, causal=causal, dropout=dropout, bias=bias, out_init=weight_init)
        self.norm_first = norm_first
        self.self_attn = attention(causal)
        if self.crossing:
            self.multihead_attn = attention(False)
        self.linear1 = Linear(width, hidden, bias, activation=activation, weight_init=weight_init)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(hidden, width, bias, weight_init=weight_init)
        self.norm1 = LayerNorm(width, eps, bias)
        self.norm2 = LayerNorm(width, eps, bias)
        if self.crossing:
            self.norm3 = LayerNorm(width, eps, bias)
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)
        if self.crossing:
            self.dropout3 = Dropout(dropout)

    def _around(self, x: Any, norm: LayerNorm, dropout: Dropout, block: Any) -> Any:
        return x + dropout(block(norm(x))) if self.norm_first else norm(x + dropout(block(x)))

    def _network(self, x: Any) -> Any:
        return self.linear2(self.dropout(self.linear1(x)))


class TransformerEncoderLayer(_Layer):
    """(B, L, D) to (B, L, D): self-attention, then the feed-forward network."""

    by_position = True                            # but for the attention, which knows where positions are
    chains = NETWORK,

    def forward(self, x: Any, mask: Any = None, key_padding_mask: Any = None) -> Any:
        x = self._around(x, self.norm1, self.dropout1,
                         lambda y: self.self_attn(y, mask, key_padding_mask=key_padding_mask))
        return self._around(x, self.norm2, self.dropout2, self._network)


class TransformerDecoderLayer(_Layer):
    """(B, L, D) and a memory (B, S, D) to (B, L, D): self-attention, attention to the memory, the feed-forward network."""

    crossing = True
    chains = NETWORK,

    def forward(self, x: Any, memory: Any, mask: Any = None, memory_mask: Any = None, key_padding_mask: Any = None,
                memory_key_padding_mask: Any = None) -> Any:
        x = self._around(x, self.norm1, self.dropout1,
                         lambda y: self.self_attn(y, mask, key_padding_mask=key_padding_mask))
        x = self._around(x, self.norm2, self.dropout2,
                         lambda y: self.multihead_attn(y, memory_mask, key=memory, key_padding_mask=memory_key_padding_mask))
        return self._around(x, self.norm3, self.dropout3, self._network)


class _Stack(Module):
    def __init__(self, layer: Module, count: int, norm: Module | None = None):
        if count < 1:
            raise ShapeError(f"{type(self).__name__}: {count} layers, expected 1 or more")
        self.layers = [layer, *(_another(layer) for _ in range(count - 1))]
        self.norm = norm


def _another(layer: Module) -> Module:
    """A layer like this one, which has no memory yet, with parameters and buffers of its own."""
    copies: dict[int, Any] = {}

    def another(leaf: Described) -> Described:
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.like(another)
        copied: Described = copies[id(leaf)]
        return copied
    for _, leaf in (*layer.named_parameters(), *layer.named_buffers()):
        another(leaf)
    return copy.deepcopy(layer, copies)


class TransformerEncoder(_Stack):
    """`count` layers like `layer`, one behind the other, and `norm` at the end; values differ, since names do."""

    by_position = True

    def forward(self, x: Any, mask: Any = None, key_padding_mask: Any = None) -> Any:
        for layer in self.layers:
            x = layer(x, mask, key_padding_mask)
        return x if self.norm is None else self.norm(x)


class TransformerDecoder(_Stack):
    """`count` layers like `layer`, each of which sees the memory, and `norm` at the end."""

    def forward(self, x: Any, memory: Any, mask: Any = None, memory_mask: Any = None, key_padding_mask: Any = None,
                memory_key_padding_mask: Any = None) -> Any:
        for layer in self.layers:
            x = layer(x, memory, mask, memory_mask, key_padding_mask, memory_key_padding_mask)
        return x if self.norm is None else self.norm(x)


class Transformer(Module):
    """(B, S, D) and (B, L, D) to (B, L, D): the first encoded, the second decoded with it. Matrices start Xavier-uniform.

    `causal`: a position of the second sees itself and what came before, without a mask.
    """

    def __init__(self, width: int = 512, heads: int = 8, encoder_layers: int = 6, decoder_layers: int = 6, hidden: int = 2048,
                 dropout: float = 0.1, activation: str = "relu", eps: float = 1e-5, norm_first: bool = False, bias: bool = True,
                 *, causal: bool = False):
        shared: dict[str, Any] = {"weight_init": init.xavier_uniform()}
        arguments = (width, heads, hidden, dropout, activation, eps, norm_first, bias)
        self.encoder = TransformerEncoder(TransformerEncoderLayer(*arguments, **shared), encoder_layers,
                                          LayerNorm(width, eps, bias))
        self.decoder = TransformerDecoder(TransformerDecoderLayer(*arguments, causal=causal, **shared), decoder_layers,
                                          LayerNorm(width, eps, bias))

    def forward(self, source: Any, target: Any, source_mask: Any = None, target_mask: Any = None, memory_mask: Any = None,
                source_key_padding_mask: Any = None, target_key_padding_mask: Any = None,
                memory_key_padding_mask: Any = None) -> Any:
        memory = self.encoder(source, source_mask, source_key_padding_mask)
        return self.decoder(target, memory, target_mask, memory_mask, target_key_padding_mask, memory_key_padding_mask)
