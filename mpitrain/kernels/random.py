"""Philox words, uniform and normal numbers, as compiled loops beside the expressions that define them.

The loops are C; where no compiler is, Numba's. Importing Numba takes longer than a short run, so it is not the first choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.backend import random as philox
from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host


def _reference(rows: Array, key: int, width: int) -> Array:
    return philox.words(key, rows, width, array_module(rows))


@host("random", "random_words", "i L:h U!:hw ih iw")
def _words_host(fill: CFunction, rows: Array, key: int, width: int) -> Array:
    out = np.empty((len(rows), width), dtype=np.uint32)
    fill(signed(key), np.ascontiguousarray(rows, dtype=np.uint64), out, *out.shape)
    return out


random_words = Kernel("random_words", _reference, _words_host, _words_host.loop("philox"))
random_words.formats = frozenset(("uint64",))
"""uint32 (R, width) from (rows (R,) uint64, key, width): see `backend.random.words`."""


def uniform(key: int, start: int, count: int, xp: Any) -> Array:
    """float64 (count,) in [0, 1): elements start .. start+count of the stream `key`, 53 random bits each."""
    return random_uniform(xp.empty(count, dtype=xp.float64), key, start)


def normal(key: int, start: int, count: int, xp: Any) -> Array:
    """float64 (count,) from the standard normal distribution (Box-Muller on two uniform numbers per element)."""
    return random_normal(xp.empty(count, dtype=xp.float64), key, start)


def _uniform(out: Array, key: int, start: int) -> Array:
    out[...] = _fractions(key, start, len(out), 2, array_module(out))[:, 0]
    return out


def _normal(out: Array, key: int, start: int) -> Array:
    xp = array_module(out)
    u = _fractions(key, start, len(out), 4, xp)
    radius = xp.sqrt(-2.0 * xp.log(1.0 - u[:, 0]))             # 1 - u is in (0, 1], so the logarithm is finite
    out[...] = radius * xp.cos((2.0 * math.pi) * u[:, 1])
    return out


def _fractions(key: int, start: int, count: int, words_each: int, xp: Any) -> Array:
    """(count, words_each // 2) uniform numbers; element i owns row start + i of the stream."""
    rows = xp.arange(start, start + count, dtype=xp.uint64)
    words = random_words(rows, key, words_each).astype(xp.uint64)
    bits = (words[:, 0::2] >> xp.uint64(5)) * xp.uint64(1 << 26) + (words[:, 1::2] >> xp.uint64(6))
    return bits.astype(xp.float64) * (1.0 / (1 << 53))


def signed(key: int) -> int:
    """A key as the integers of C take it."""
    return key - (1 << 64) if key >> 63 else key


def _elements(name: str, reference: Callable[..., Array]) -> Kernel:
    @host("random", name, "D!:n i i in")
    def fill(run: CFunction, out: Array, key: int, start: int) -> Array:
        run(out, signed(key), signed(start), len(out))
        return out
    return Kernel(name, reference, fill, fill.loop("philox"))


random_uniform = _elements("random_uniform", _uniform)
"""Fills float64 (n,) with elements start .. start + n of the stream `key`, uniform in [0, 1): (out, key, start), out again."""

random_normal = _elements("random_normal", _normal)
"""The same from the standard normal distribution; the compiled version has logarithms and cosines of its own."""
