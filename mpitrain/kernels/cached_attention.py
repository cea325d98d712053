"""Attention of a new position to the positions before it, whose keys and values are kept: the same bits as in the whole text.

Letters: `B` rows, `H` heads, `D` width of one, `S` slots, `C` positions of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.blocked_attention import BLOCK
from mpitrain.kernels.flash_attention import flash_attention
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, Scratch, host, misfit


def _cached_attention(qkv: Array, keys: Array, values: Array, slots: Array, at: Array) -> Array:
    return _by_blocks(flash_attention.reference, qkv, keys, values, slots, at)


def _by_blocks(attend: Callable[..., object], qkv: Array, keys: Array, values: Array, slots: Array, at: Array) -> Array:
    """Each query stands at its own row in a block of queries, as it does in the whole text."""
    xp = array_module(qkv)
    _, heads, _, width = keys.shape
    parts = qkv.reshape(len(qkv), 3, heads, width)
    out = xp.empty((len(qkv), heads, width), qkv.dtype)
    for row, (slot, place) in enumerate(zip(slots.tolist(), at.tolist())):
        keys[slot, :, place], values[slot, :, place] = parts[row, 1], parts[row, 2]
        block = xp.zeros((1, heads, BLOCK, width), qkv.dtype)
        block[0, :, place % BLOCK] = parts[row, 0]
        made = xp.empty_like(block)
        seen = slice(slot, slot + 1), slice(None), slice(place + 1)
        attend(block, keys[seen], values[seen], made, scale_of(width), False, None)
        out[row] = made[0, :, place % BLOCK]
    return out.reshape(len(qkv), heads * width)


@host("flash_attention", "cached_attention", "X:3bhw X!:shcw X!:shcw X!:bhw L:b L:b X!:w+256 ib ih iw is ic d", answers=True)
def _cached_attention_host(call: CFunction, qkv: Array, keys: Array, values: Array, slots: Array, at: Array) -> Array:
    (n_slots, heads, capacity, width), rows = keys.shape, len(qkv)
    if values.shape != keys.shape or qkv.shape != (rows, 3 * heads * width):
        misfit("cached_attention", qkv, keys, values)
    out = np.empty((rows, heads * width), qkv.dtype)
    room = _scratch.room((width + 256) * qkv.itemsize).view(qkv.dtype)
    call(np.ascontiguousarray(qkv), keys, values, out, slots, at, room, rows, heads, width, n_slots, capacity, scale_of(width))
    return out


def scale_of(width: int) -> float:
    return 1 / math.sqrt(max(width, 1))


def _in_numba() -> Callable[..., Array] | None:
    attend = flash_attention.numba()
    return None if attend is None else lambda *arguments: _by_blocks(attend, *arguments)


_scratch = Scratch()

cached_attention = Kernel("cached_attention", _cached_attention, _cached_attention_host, _in_numba)
"""What each row's query makes (B, H D) of the positions up to its own, from (qkv (B, 3 H D), keys and values (S, H, C, D), slots
and positions (B,) int64): the row's own key and value are written to their place first."""
