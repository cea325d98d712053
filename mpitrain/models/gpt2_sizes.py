"""GPT-2 in the four sizes of Radford et al. 2019: `gpt` with their numbers, and with biases and the GELU by tanh."""

from __future__ import annotations

from mpitrain.models.transformer import gpt
from mpitrain.nn import Module

TOKENS = 50257                                    # of its byte pairs


def _gpt2(layers: int, heads: int, width: int, block: int, vocabulary: int, dropout: float) -> Module:
    model = gpt(layers, heads, width, block, vocabulary, dropout, bias=True, activation="gelu_tanh")
    model.size_keys = {}                          # the names of published sizes take no others
    return model


def gpt2(block: int = 1024, vocabulary: int = TOKENS, dropout: float = 0.1) -> Module:
    """12 blocks of 768 numbers, 124 M parameters; `block` is the longest sequence it takes."""
    return _gpt2(12, 12, 768, block, vocabulary, dropout)


def gpt2_medium(block: int = 1024, vocabulary: int = TOKENS, dropout: float = 0.1) -> Module:
    """24 blocks of 1024 numbers, 355 M parameters; see `gpt2`."""
    return _gpt2(24, 16, 1024, block, vocabulary, dropout)


def gpt2_large(block: int = 1024, vocabulary: int = TOKENS, dropout: float = 0.1) -> Module:
    """36 blocks of 1280 numbers, 774 M parameters; see `gpt2`."""
    return _gpt2(36, 20, 1280, block, vocabulary, dropout)


def gpt2_xl(block: int = 1024, vocabulary: int = TOKENS, dropout: float = 0.1) -> Module:
    """48 blocks of 1600 numbers, 1.6 billion parameters; see `gpt2`."""
    return _gpt2(48, 25, 1600, block, vocabulary, dropout)
