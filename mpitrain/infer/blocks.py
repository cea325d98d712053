"""Blocks of a gpt for a new position of each text in one call of C (native/decode.c), and its head in another, where they are
plain; else op by op.

A block is plain where its layers are those of the model as it is written: whole on this rank, without hooks, in floats or in a
format of ours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpitrain import nn
from mpitrain.autograd import Tensor
from mpitrain.backend import Array
from mpitrain.backend.native import load
from mpitrain.infer.cache import CachedAttention
from mpitrain.kernels import linear
from mpitrain.kernels.library import Scratch, bind
from mpitrain.kernels.pointwise import ACTIVATIONS
from mpitrain.kernels.product import is_fast
from mpitrain.models.transformer import Block, Head
from mpitrain.nn.lowbit import LowBitLinear
from mpitrain.shrink import formats

MOST_ROWS = 8                                     # from there on products of rows packed together are as fast
BLOCKS = "X!:rd L:26l L:10 L:r L:r X!:3rd+4rhw+rf+2r+w+256 M!:rd+rhw+rf+136r ir id ih iw if il is ic d d"
HEAD = "X:rd L:7 L:10 X!:rn X!:rd+2r M!:rd+136r ir id in d"
FUNCTIONS = (("layer_norm", "row_norm"), ("product", "few_rows"), ("product", "few_rows_packed"), ("lowbit", "lowbit_int8"),
             ("lowbit", "lowbit_int4"), ("lowbit", "lowbit_rows"), ("lowbit", "lowbit_int8_integers"),
             ("lowbit", "lowbit_int4_integers"), ("flash_attention", "cached_attention"))
LIBRARIES = {library for library, _ in FUNCTIONS} | {"decode", "pointwise"}
NAMES = {"f": "float32", "d": "float64"}
AS_THEY_LIE, PACKED = 0, 1                        # native/decode.c's ways to keep a weight
WAYS: dict[type[nn.Format], int] = {formats.Int8: 2, formats.Int4: 3, formats.Int8Dynamic: 4, formats.Int8Static: 4,
                                    formats.Int4Dynamic: 5, formats.Int4Static: 5}

Step: TypeAlias = tuple[str, nn.Module, Callable[[Tensor], Tensor] | None, int]


class Table:
    """The addresses that C reads of layers one after another, and the arrays at these."""

    def __init__(self, dtype: Any, pack: bool, activation: str | None = None):
        self.dtype, self.pack = np.dtype(dtype), pack
        self._held: list[Array] = []
        self._numbers: list[int] = []
        ending = NAMES[self.dtype.char]
        whole = {"lowbit": ""}                        # of one dtype
        self.functions = np.array([_address(library, name + whole.get(library, f"_{ending}")) for library, name in FUNCTIONS]
                                  + [0 if activation is None else _address("pointwise", f"{activation}_{ending}")], np.int64)

    def arrays(self, arrays: Iterable[Array | None]) -> None:
        for array in arrays:
            if array is not None:
                self._held.append(array)
            self._numbers.append(0 if array is None else array.ctypes.data)

    def norm(self, layer: nn.LayerNorm) -> None:
        self.arrays([layer.weight.array, None if layer.bias is None else layer.bias.array])

    def product(self, layer: Any) -> None:
        bias = None if layer.bias is None else layer.bias.array
        if isinstance(layer, LowBitLinear):
            own = layer.arrays()
            self._numbers.append(WAYS[type(layer.format)])
            self.arrays([own["weight"], own["scale"], bias, own.get("input_scale")])
            return
        packed = linear.pack(layer.weight.array) if self.pack and is_fast() else None
        self._numbers.append(AS_THEY_LIE if packed is None else PACKED)
        self.arrays([layer.weight.array if packed is None else packed, None, bias, None])

    @property
    def numbers(self) -> Array:
        return np.array(self._numbers, np.int64)


class PlainBlocks:
    """Blocks that follow each other, of one size, with their layers of a cache. `pack`: floats are packed, once for all."""

    def __init__(self, blocks: Sequence[Any], pack: bool = False):
        first = self.first = blocks[0]
        layer: CachedAttention = first.attention.across
        self.layers, self.keys = len(blocks), layer.keys
        self.cache, self.scale = layer.cache, layer.scale
        table = self._held = Table(layer.keys.dtype, pack, first.wide.fused)
        for block in blocks:
            table.norm(block.norm1)
            table.product(block.attention.qkv)
            table.product(block.attention.out)
            table.norm(block.norm2)
            table.product(block.wide)
            table.product(block.narrow)
            table.arrays([block.attention.across.keys, block.attention.across.values])
        self._table, self._functions, self._hidden = table.numbers, table.functions, outputs_of(first.wide)
        self._call = bind("decode", "blocks", BLOCKS, answers=True)
        self._numbers, self._bytes = Scratch(), Scratch()

    def __call__(self, x: Tensor) -> Tensor:
        """x (B, 1, D) after the blocks."""
        rows, _, width = x.shape
        n_slots, heads, capacity, of_head = self.keys.shape
        hidden, dtype = self._hidden, self.keys.dtype
        size = rows * (3 * width + 4 * heads * of_head + hidden + 2) + of_head + 256
        numbers = self._numbers.room(size * dtype.itemsize).view(dtype)
        bytes_ = self._bytes.room(rows * (width + heads * of_head + hidden + 136))
        made = np.array(x.array, dtype, order="C")
        assert self._call is not None
        self._call(made, self._table, self._functions, np.array(self.cache.rows, np.int64), np.array(self.cache.starts, np.int64),
                   numbers, bytes_, rows, width, heads, of_head, hidden, self.layers, n_slots, capacity, self.first.norm1.eps,
                   self.scale)
        return Tensor(made)


class PlainHead:
    """The norm behind the blocks and the layer that makes logits."""

    def __init__(self, norm: nn.LayerNorm, head: Any, pack: bool = False):
        table = self._held = Table(norm.weight.array.dtype, pack)
        table.norm(norm)
        table.product(head)
        self._table, self._functions, self._outputs, self._eps = table.numbers, table.functions, outputs_of(head), norm.eps
        self._call = bind("decode", "head", HEAD)
        self._numbers, self._bytes = Scratch(), Scratch()

    def __call__(self, x: Tensor) -> Tensor:
        """Logits (B, 1, V) of x (B, 1, D)."""
        rows, _, width = x.shape
        dtype = self._held.dtype
        given, made = np.ascontiguousarray(x.array, dtype), np.empty((rows, 1, self._outputs), dtype)
        assert self._call is not None
        self._call(given, self._table, self._functions, made, self._numbers.room(rows * (width + 2) * dtype.itemsize).view(dtype),
                   self._bytes.room(rows * (width + 136)), rows, width, self._outputs, self._eps)
        return Tensor(made)


def joined(blocks: Sequence[tuple[str, nn.Module]], pack: bool = False) -> list[Step]:
    """(name, block, what runs it and those behind it in one call or None, how many it runs) of each block."""
    found: list[Step] = []
    for place, (name, block) in enumerate(blocks):
        run = 0
        while place + run < len(blocks) and _is_plain(blocks[place + run][1], block):
            run += 1
        starts = run and not (place and _is_plain(blocks[place - 1][1], block))
        together: Any = PlainBlocks([b for _, b in blocks[place:place + run]], pack) if starts else None
        count = run if starts else 1
        if place + 2 == len(blocks) and _is_plain_head(block, blocks[-1][1]):
            together, count = PlainHead(block, blocks[-1][1], pack), 2
        found.append((name, block, together, count))
    return found


def _is_plain(block: Any, first: Any) -> bool:
    """Whether C can run it, after `first`."""
    if type(block) is not Block or block.mixture is not None or type(first) is not Block or first.mixture is not None:
        return False
    attention = block.attention
    if (type(attention) is not nn.MultiHeadAttention or attention.rope is not None
            or not isinstance(attention.across, CachedAttention)):
        return False
    dtype = attention.across.keys.dtype
    linears = (attention.qkv, attention.out, block.wide, block.narrow)
    return (all(_norm_suits(norm, dtype) and norm.eps == first.norm1.eps for norm in (block.norm1, block.norm2))
            and block.norm1.shape == first.norm1.shape
            and all(_product_suits(layer, dtype) for layer in linears)
            and all(layer.fused is None for layer in (attention.qkv, attention.out, block.narrow))
            and (block.wide.fused is None or ACTIVATIONS[block.wide.fused].number > 0) and block.wide.fused == first.wide.fused
            and outputs_of(block.wide) == outputs_of(first.wide) and attention.heads == first.attention.heads
            and all(module._hooks is None for module in block.modules())
            and all(load(library) is not None for library in LIBRARIES))


def _is_plain_head(norm: Any, head: Any) -> bool:
    if type(norm) is not nn.LayerNorm or type(head) not in (nn.Linear, Head, LowBitLinear):
        return False
    dtype = norm.weight.array.dtype
    return (dtype.char in NAMES and _norm_suits(norm, dtype) and _product_suits(head, dtype) and head.fused is None
            and norm._hooks is None and head._hooks is None and all(load(library) is not None for library in LIBRARIES))


def _norm_suits(norm: Any, dtype: Any) -> bool:
    return type(norm) is nn.LayerNorm and _suit([norm.weight, norm.bias], dtype)


def _product_suits(layer: Any, dtype: Any) -> bool:
    """Whether it is a linear layer whole on this rank, in floats of this dtype or in a format that C multiplies with them."""
    if type(layer) is LowBitLinear:
        return (type(layer.format) in WAYS and dtype == np.float32 and layer.across is None and _suit([layer.bias], dtype)
                and (layer.after is None or layer.fused is not None)
                and all(array.flags.carray for array in layer.arrays().values()))
    return (_is_dense(layer) and layer.across is None and layer.after is None
            and _suit([layer.weight, layer.bias], dtype))


def _is_dense(layer: Any) -> bool:
    """Whether a layer computes with all of its weight, for as few rows as come together here."""
    return type(layer) in (nn.Linear, Head) or (type(layer) is nn.SparseLinear and layer.form == "csr")


def _suit(leaves: Iterable[Any], dtype: Any) -> bool:
    return all(isinstance(leaf.array, np.ndarray) and leaf.array.flags.carray and leaf.array.dtype == dtype
               for leaf in leaves if leaf is not None)


def outputs_of(layer: Any) -> int:
    return int(layer.outputs if isinstance(layer, LowBitLinear) else layer.weight.shape[0])


def _address(library: str, name: str) -> int:
    loaded = load(library)
    assert loaded is not None, "blocks are plain only where it is"
    address = ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
    assert address is not None
    return address
