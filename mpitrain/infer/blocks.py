"""Blocks of a gpt for a new position of each text in one call of C (native/decode.c), where they are plain: else op by op.

A block is plain where its layers are those of the model as it is written: whole on this rank, without hooks, in no other format.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mpitrain import nn
from mpitrain.autograd import Tensor
from mpitrain.backend.native import load
from mpitrain.infer.cache import CachedAttention
from mpitrain.kernels.library import Scratch, bind
from mpitrain.kernels.pointwise import ACTIVATIONS
from mpitrain.models.transformer import Block

MOST_ROWS = 8                                     # from there on products of rows packed together are as fast
SIGNATURE = "X!:rd L:14l L:3 L:r L:r X!:7rd+rf+2r+w+256 ir id ih iw if il is ic i d d"
LIBRARIES = {"layer_norm": "row_norm", "product": "few_rows", "flash_attention": "cached_attention"}
NAMES = {"f": "float32", "d": "float64"}


class PlainBlocks:
    """Blocks that follow each other, of one size, with their layers of a cache."""

    def __init__(self, blocks: Sequence[Any]):
        first = self.first = blocks[0]
        layer: CachedAttention = first.attention.across
        self.layers, self.keys = len(blocks), layer.keys
        self.cache, self.scale = layer.cache, layer.scale
        self._held = [list(_arrays(block)) for block in blocks]      # what the table points to
        self._table = np.array([[0 if x is None else x.ctypes.data for x in arrays] for arrays in self._held], np.int64)
        self._call = bind("decode", "blocks", SIGNATURE, answers=True)
        self._functions = np.array([_address(library, f"{name}_{NAMES[layer.keys.dtype.char]}")
                                    for library, name in LIBRARIES.items()], np.int64)
        self._scratch = Scratch()

    def __call__(self, x: Tensor) -> Tensor:
        """x (B, 1, D) after the blocks."""
        rows, _, width = x.shape
        n_slots, heads, capacity, of_head = self.keys.shape
        hidden, dtype = self.first.wide.weight.shape[0], self.keys.dtype
        room = self._scratch.room((rows * (7 * width + hidden + 2) + of_head + 256) * dtype.itemsize).view(dtype)
        made = np.array(x.array, dtype, order="C")
        activation = 0 if self.first.wide.fused is None else ACTIVATIONS[self.first.wide.fused].number
        assert self._call is not None
        self._call(made, self._table, self._functions, np.array(self.cache.rows, np.int64), np.array(self.cache.starts, np.int64),
                   room, rows, width, heads, of_head, hidden, self.layers, n_slots, capacity, activation, self.first.norm1.eps,
                   self.scale)
        return Tensor(made)


Step: TypeAlias = tuple[str, nn.Module, PlainBlocks | None, int]


def joined(blocks: Sequence[tuple[str, nn.Module]]) -> list[Step]:
    """(name, block, what runs it and those behind it in one call or None, how many it runs) of each block."""
    found: list[Step] = []
    for place, (name, block) in enumerate(blocks):
        run = 0
        while place + run < len(blocks) and _is_plain(blocks[place + run][1], block):
            run += 1
        starts = run and not (place and _is_plain(blocks[place - 1][1], block))
        together = PlainBlocks([b for _, b in blocks[place:place + run]]) if starts else None
        found.append((name, block, together, run if starts else 1))
    return found


def _is_plain(block: Any, first: Any) -> bool:
    """Whether C can run it, after `first`."""
    if type(block) is not Block or block.mixture is not None or type(first) is not Block or first.mixture is not None:
        return False
    attention, norms = block.attention, (block.norm1, block.norm2)
    if type(attention) is not nn.MultiHeadAttention or not isinstance(attention.across, CachedAttention):
        return False
    linears = (attention.qkv, attention.out, block.wide, block.narrow)
    alike = [(norm.eps, norm.shape, linear.weight.dtype) for norm in (*norms, first.norm1) for linear in (block.wide, first.wide)
             if type(norm) is nn.LayerNorm and type(linear) is nn.Linear]
    return (len(alike) == 6 and len(set(alike)) == 1
            and all(type(linear) is nn.Linear and linear.across is None and linear.after is None for linear in linears)
            and all(linear.fused is None for linear in (attention.qkv, attention.out, block.narrow))
            and (block.wide.fused is None or ACTIVATIONS[block.wide.fused].number > 0) and block.wide.fused == first.wide.fused
            and block.wide.weight.shape == first.wide.weight.shape and attention.heads == first.attention.heads
            and all(module._hooks is None for module in block.modules())
            and all(isinstance(x, np.ndarray) and x.flags.carray for x in _arrays(block) if x is not None)
            and all(load(library) is not None for library in (*LIBRARIES, "decode")))


def _arrays(block: Any) -> list[Any]:
    """What native/decode.c wants of a block, in its order."""
    attention = block.attention
    layers = (block.norm1, attention.qkv, attention.out, block.norm2, block.wide, block.narrow)
    leaves = [leaf for layer in layers for leaf in (layer.weight, layer.bias)]
    return [*(None if leaf is None else leaf.array for leaf in leaves), attention.across.keys, attention.across.values]


def _address(library: str, name: str) -> int:
    loaded = load(library)
    assert loaded is not None, "blocks are plain only where it is"
    return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0
