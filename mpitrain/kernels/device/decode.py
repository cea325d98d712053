"""Attention to kept keys and values on a device; see kernels/cached_attention.py and native/device/decode.cu.

Nothing waits for the device: `slots` and `at` are read there alone, and a place that is not in the cache gives NaN.
"""

from __future__ import annotations

from mpitrain.backend.namespace import Array, array_module
from mpitrain.errors import ShapeError
from mpitrain.kernels.cached_attention import groups_of, scale_of
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, computed, contiguous

SOURCE, THREADS, MOST_WIDTH = Source("decode"), 128, 256
LEAST, PIECES = 64, 64        # keys of a piece at least: 16 KiB of 16 bits at a width of 64; pieces at most: one block joins them
_attend = SOURCE.function("attend_piece", "X:bhgw+2bhw X!:shcw X!:shcw S!:bhgpw S!:bhgp S!:bhgp L:b L:b ib ih ig iw is ic ip "
                                          "i i d")
_join = SOURCE.function("join_pieces", "X!:bhgw S:bhgpw S:bhgp S:bhgp L:b L:b ib ih ig iw i ic ip i")


@device("cached_attention")
def cached_attention(qkv: Array, keys: Array, values: Array, slots: Array, at: Array) -> Array:
    (n_slots, heads, capacity, width), rows, xp = keys.shape, len(qkv), array_module(qkv)
    if width > MOST_WIDTH:
        raise ShapeError(f"cached_attention: heads are {width} wide, and kernels of a device take {MOST_WIDTH} at most")
    groups = groups_of(qkv, keys, values)
    out = xp.empty((rows, heads * groups * width), qkv.dtype)
    if not out.size:
        return out
    piece = max(LEAST, -(-capacity // (PIECES * LEAST)) * LEAST)
    pieces, lanes = -(-capacity // piece), 8 if width <= 64 else 16 if width <= 128 else 32
    partial = xp.empty((rows * heads * groups, pieces, width), computed(qkv.dtype))
    tops, sums = (xp.empty((rows * heads * groups, pieces), partial.dtype) for _ in range(2))
    sizes = rows, heads, groups, width, n_slots, capacity, pieces, piece
    _attend((rows * heads * pieces,), THREADS, contiguous(qkv), keys, values, partial, tops, sums, slots, at, *sizes, lanes,
            scale_of(width))
    _join((rows * heads * groups,), THREADS, out, partial, tops, sums, slots, at, *sizes)
    return out
