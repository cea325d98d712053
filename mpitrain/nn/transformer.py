"""Transformer layers and stacks of them, encoder and decoder (Vaswani et al. 2017). Letters: `B` batch, `L` length, `D` width.

Arguments, names, order and shapes of parameters are PyTorch's, but for `qkv` and `out` in attention, and for the batch, which
comes first unless `batch_first` is False. So are masks, (L, S) or (B * heads, L, S), or what broadcasts to (B, heads, L, S):
boolean ones are True where a position may NOT look, others are added to the scores. This is the opposite of the sense that
`mask` has in `MultiHeadAttention`. Key padding masks (B, S) are True where a key is padding. With `is_causal`, a position sees
itself and what came before, with a mask or without; a layer made with `causal=True` always does so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array, is_array, is_float
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
Activation = str | Callable[[Any], Any]           # a name of `nn.ACTIVATIONS`, or a function


class _Layer(Module):
    """Attention and a feed-forward network of `dim_feedforward` numbers, each with a residual, and a norm after it or
    `norm_first`."""

    crossing = False                              # whether there is attention to a memory

    def __init__(self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1,
                 activation: Activation = "relu", layer_norm_eps: float = 1e-5, batch_first: bool = True,
                 norm_first: bool = False, bias: bool = True, *, causal: bool = False,
                 weight_init: Initialiser = init.default_weight):
        def attention(causal: bool) -> MultiHeadAttention:
            return MultiHeadAttention(d_model, nhead, causal=causal, dropout=dropout, bias=bias, out_init=weight_init)
        for what, flag in (("batch_first", batch_first), ("norm_first", norm_first), ("bias", bias)):
            if not isinstance(flag, bool):
                raise ShapeError(f"{type(self).__name__}: {what} is {flag!r}, expected True or False")
        self.batch_first, self.norm_first = batch_first, norm_first
        if not batch_first:
            self.by_position = False              # dim 1 is the batch
        self.self_attn = attention(causal)
        if self.crossing:
            self.multihead_attn = attention(False)
        name = activation if isinstance(activation, str) else None
        self.linear1 = Linear(d_model, dim_feedforward, bias, activation=name, weight_init=weight_init)
        self.activation = None if isinstance(activation, str) else activation
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, weight_init=weight_init)
        self.norm1 = LayerNorm(d_model, layer_norm_eps, bias)
        self.norm2 = LayerNorm(d_model, layer_norm_eps, bias)
        if self.crossing:
            self.norm3 = LayerNorm(d_model, layer_norm_eps, bias)
        self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout)
        if self.crossing:
            self.dropout3 = Dropout(dropout)

    def _turned(self, x: Any) -> Any:
        """x with its batch first, or back again."""
        return x if self.batch_first or len(x.shape) != 3 else ops.swapaxes(x, 0, 1)

    def _mask(self, name: str, mask: Any, samples: Any) -> Any:
        """A mask of ours, True where a position may look, of PyTorch's; `samples` come with the batch first."""
        mask = self._checked(name, mask)
        if mask is None:
            return None
        if mask.dtype == bool:
            mask = ~mask
        heads, batch = self.self_attn.heads, samples.shape[0] if len(samples.shape) == 3 else 1
        if len(mask.shape) != 3:
            return mask
        if mask.shape[0] != batch * heads:
            raise ShapeError(f"{type(self).__name__}: {name} has shape {tuple(mask.shape)}, expected (L, S) or ({batch} samples "
                             f"x {heads} heads, L, S)")
        return ops.reshape(mask, batch, heads, *mask.shape[1:]) if isinstance(mask, Tensor) else \
            mask.reshape(batch, heads, *mask.shape[1:])

    def _checked(self, name: str, mask: Any) -> Any:
        """A mask that is an array, or a tensor of numbers to add."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor):
            mask = mask if is_array(mask) else np.asarray(mask)
        if mask.dtype.kind != "b" and not is_float(mask.dtype):
            raise ShapeError(f"{type(self).__name__}: {name} is {mask.dtype}, expected bool, True where nobody looks, or "
                             "floating-point numbers to add")
        return mask.array if isinstance(mask, Tensor) and mask.dtype == bool else mask

    def _around(self, x: Any, norm: LayerNorm, dropout: Dropout, block: Any) -> Any:
        return x + dropout(block(norm(x))) if self.norm_first else norm(x + dropout(block(x)))

    def _network(self, x: Any) -> Any:
        y = self.linear1(x)
        return self.linear2(self.dropout(y if self.activation is None else self.activation(y)))


class TransformerEncoderLayer(_Layer):
    """(B, L, D) to (B, L, D): self-attention, then the feed-forward network."""

    by_position = True                            # but for the attention, which knows where positions are
    chains = NETWORK,

    def forward(self, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False) -> Any:
        x = self._turned(src)
        mask = self._mask("src_mask", src_mask, x)
        padding = self._checked("src_key_padding_mask", src_key_padding_mask)
        x = self._around(x, self.norm1, self.dropout1,
                         lambda y: self.self_attn(y, mask, key_padding_mask=padding, is_causal=is_causal))
        return self._turned(self._around(x, self.norm2, self.dropout2, self._network))


class TransformerDecoderLayer(_Layer):
    """(B, L, D) and a memory (B, S, D) to (B, L, D): self-attention, attention to the memory, the feed-forward network."""

    crossing = True
    chains = NETWORK,

    def forward(self, tgt: Any, memory: Any, tgt_mask: Any = None, memory_mask: Any = None, tgt_key_padding_mask: Any = None,
                memory_key_padding_mask: Any = None, tgt_is_causal: bool = False, memory_is_causal: bool = False) -> Any:
        x, memory = self._turned(tgt), self._turned(memory)
        own, other = self._mask("tgt_mask", tgt_mask, x), self._mask("memory_mask", memory_mask, x)
        padding = self._checked("tgt_key_padding_mask", tgt_key_padding_mask)
        hidden = self._checked("memory_key_padding_mask", memory_key_padding_mask)
        x = self._around(x, self.norm1, self.dropout1,
                         lambda y: self.self_attn(y, own, key_padding_mask=padding, is_causal=tgt_is_causal))
        x = self._around(x, self.norm2, self.dropout2,
                         lambda y: self.multihead_attn(y, other, key=memory, key_padding_mask=hidden, is_causal=memory_is_causal))
        return self._turned(self._around(x, self.norm3, self.dropout3, self._network))


class _Stack(Module):
    def __init__(self, layer: Module, num_layers: int, norm: Module | None = None):
        if num_layers < 1:
            raise ShapeError(f"{type(self).__name__}: {num_layers} layers, expected 1 or more")
        self.layers = [layer, *(_another(layer) for _ in range(num_layers - 1))]
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
    """`num_layers` layers like `encoder_layer`, one behind the other, and `norm` at the end; values differ, since names do."""

    by_position = True

    def __init__(self, encoder_layer: Module, num_layers: int, norm: Module | None = None):
        super().__init__(encoder_layer, num_layers, norm)

    def forward(self, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False) -> Any:
        x = src
        for layer in self.layers:
            x = layer(x, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=is_causal)
        return x if self.norm is None else self.norm(x)


class TransformerDecoder(_Stack):
    """`num_layers` layers like `decoder_layer`, each of which sees the memory, and `norm` at the end."""

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None):
        super().__init__(decoder_layer, num_layers, norm)

    def forward(self, tgt: Any, memory: Any, tgt_mask: Any = None, memory_mask: Any = None, tgt_key_padding_mask: Any = None,
                memory_key_padding_mask: Any = None, tgt_is_causal: bool = False, memory_is_causal: bool = False) -> Any:
        x = tgt
        for layer in self.layers:
            x = layer(x, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
                      memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=tgt_is_causal,
                      memory_is_causal=memory_is_causal)
        return x if self.norm is None else self.norm(x)


class Transformer(Module):
    """(B, S, D) and (B, L, D) to (B, L, D): the first encoded, the second decoded with it. Matrices start Xavier-uniform.

    `causal`: a position of the second sees itself and what came before, without a mask.
    """

    def __init__(self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 6, num_decoder_layers: int = 6,
                 dim_feedforward: int = 2048, dropout: float = 0.1, activation: Activation = "relu",
                 custom_encoder: Module | None = None, custom_decoder: Module | None = None, layer_norm_eps: float = 1e-5,
                 batch_first: bool = True, norm_first: bool = False, bias: bool = True, *, causal: bool = False):
        shared: dict[str, Any] = {"weight_init": init.xavier_uniform()}
        arguments = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)
        self.encoder = custom_encoder if custom_encoder is not None else TransformerEncoder(
            TransformerEncoderLayer(*arguments, **shared), num_encoder_layers, LayerNorm(d_model, layer_norm_eps, bias))
        self.decoder = custom_decoder if custom_decoder is not None else TransformerDecoder(
            TransformerDecoderLayer(*arguments, causal=causal, **shared), num_decoder_layers,
            LayerNorm(d_model, layer_norm_eps, bias))

    @staticmethod
    def generate_square_subsequent_mask(sz: int) -> Array:
        """(sz, sz): True where a position may not look, at what comes after it."""
        return ~np.tri(sz, dtype=bool)

    def forward(self, src: Any, tgt: Any, src_mask: Any = None, tgt_mask: Any = None, memory_mask: Any = None,
                src_key_padding_mask: Any = None, tgt_key_padding_mask: Any = None, memory_key_padding_mask: Any = None,
                src_is_causal: bool = False, tgt_is_causal: bool = False, memory_is_causal: bool = False) -> Any:
        memory = self.encoder(src, mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal)
        return self.decoder(tgt, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
                            memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=tgt_is_causal,
                            memory_is_causal=memory_is_causal)
