"""Attention of a new position to the positions before it, whose keys and values are kept: the same bits as in the whole text.

Letters: `B` rows, `H` heads of keys, `G` heads of queries for each of them, `D` width of one, `S` slots, `C` positions of each.
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
    groups = groups_of(qkv, keys, values)
    queries = qkv[:, :heads * groups * width].reshape(len(qkv), heads, groups, width)
    new = qkv[:, heads * groups * width:].reshape(len(qkv), 2, heads, width)
    out = xp.empty((len(qkv), heads, groups, width), qkv.dtype)
    for row, (slot, place) in enumerate(zip(slots.tolist(), at.tolist())):
        keys[slot, :, place], values[slot, :, place] = new[row, 0], new[row, 1]
        seen = slice(slot, slot + 1), slice(None), slice(place + 1)
        for group in range(groups):
            block = xp.zeros((1, heads, BLOCK, width), qkv.dtype)
            block[0, :, place % BLOCK] = queries[row, :, group]
            made = xp.empty_like(block)
            attend(block, keys[seen], values[seen], made, scale_of(width), False, None)
            out[row, :, group] = made[0, :, place % BLOCK]
    return out.reshape(len(qkv), heads * groups * width)


def groups_of(qkv: Array, keys: Array, values: Array) -> int:
    """How many heads of queries share one of keys: qkv (B, H G D + 2 H D), keys and values (S, H, C, D)."""
    _, heads, _, width = keys.shape
    groups = qkv.shape[1] // (heads * width) - 2 if heads * width else 1
    if values.shape != keys.shape or qkv.ndim != 2 or groups < 1 or qkv.shape[1] != heads * (groups + 2) * width:
        misfit("cached_attention", qkv, keys, values)
    return int(groups)


@host("flash_attention", "cached_attention", "X:3bhw X!:shcw X!:shcw X!:bhw L:b L:b X!:w+256 ib ih iw is ic d", answers=True)
def _cached_attention_host(call: CFunction, qkv: Array, keys: Array, values: Array, slots: Array, at: Array) -> Array:
    (n_slots, heads, capacity, width), rows = keys.shape, len(qkv)
    if groups_of(qkv, keys, values) != 1:
        return _cached_attention(qkv, keys, values, slots, at)
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
"""What each row's queries make (B, H G D) of the positions up to its own, from (qkv (B, H G D + 2 H D), keys and values (S, H, C,
D), slots and positions (B,) int64): the row's own keys and values are written to their place first. C's is for G = 1."""
