"""Attention to some keys, and then to others, put together: what attention to all of them gives.

A softmax's largest score and sum are enough to correct what was made with another's (Milakov and Gimelshein: "Online normalizer
calculation for softmax", 2018). Letters as in `flash_attention`.
"""

from __future__ import annotations

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host


def _join(out: Array, tops: Array, inverses: Array, other: Array, other_tops: Array, other_inverses: Array) -> None:
    xp = array_module(out)
    low = tops.dtype.type(-float("inf"))
    top = xp.maximum(xp.where(inverses == 0, low, tops), xp.where(other_inverses == 0, low, other_tops))
    top = xp.where(top == low, top.dtype.type(0), top)                    # a query that met no key at all stays zeros
    sums = [_share(inverses, tops, top), _share(other_inverses, other_tops, top)]
    total = sums[0] + sums[1]
    inverse = xp.where(total == 0, total, 1 / xp.where(total == 0, total.dtype.type(1), total))
    out *= (sums[0] * inverse)[..., None]
    out += other * (sums[1] * inverse)[..., None]
    tops[...], inverses[...] = top, inverse


def _share(inverses: Array, tops: Array, top: Array) -> Array:
    """The sum of exps above `top`; 0 for a query that met no key."""
    xp = array_module(tops)
    none = inverses == 0
    return xp.where(none, inverses, xp.exp(xp.where(none, top, tops) - top) / xp.where(none, top.dtype.type(1), inverses))


@host("joined_attention", "join", "ppppppp")
def _join_host(call: CFunction, out: Array, tops: Array, inverses: Array, other: Array, other_tops: Array,
               other_inverses: Array) -> None:
    if out.size:
        steps = [x.strides[dim] // x.itemsize for x in (out, other) for dim in range(3)]
        shape = np.array([*out.shape, *steps], np.int64)
        call(tops, inverses, out[0, 0, 0], other_tops, other_inverses, other[0, 0, 0], shape)


join_attention = Kernel("join_attention", _join, host=_join_host)
"""Makes out (B, H, L, E), tops and inverses (B, H, L), which `flash_attention` gave for some keys, what it would give for those
and the keys of `other`.

Arguments: out, tops, inverses, other, other_tops, other_inverses; only rows of `out` and `other` are without gaps."""
