"""Philox-4x32-10 as in native/philox.h, and the numbers that native/random.c makes of it: the same bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.backend import random as philox
from mpitrain.kernels.loops.mathematics import bits_of, choose, number_of

M0, M1 = (np.uint64(m) for m in philox.MULTIPLIERS)
W0, W1 = (np.uint64(w) for w in philox.WEYL)
MASK, HALF, ROUNDS = np.uint64(philox.MASK), np.uint64(32), philox.ROUNDS
AT_ONCE = 256


@register_jitable
def mixed(key: Any, row: Any, block: Any) -> Any:
    """The four words of a counter."""
    c0, c1, c2, c3 = block & MASK, block >> HALF, row & MASK, row >> HALF
    k0, k1 = key & MASK, key >> HALF
    for _ in range(ROUNDS):
        a, b = c0 * M0, c2 * M1
        c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ k0, b & MASK, (a >> HALF) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + W0) & MASK, (k1 + W1) & MASK
    return c0, c1, c2, c3


@register_jitable
def words_along(key: Any, row: Any, block: int, out: Any, n: int) -> None:
    """Words [4 block, 4 (block + n)) of one row."""
    for i in range(n):
        c0, c1, c2, c3 = mixed(key, row, np.uint64(block + i))
        out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3] = c0, c1, c2, c3


def random_words(key: int, rows: Any, out: Any, height: int, width: int) -> None:
    for r in range(height):
        for block in range((width + 3) // 4):
            for j, word in enumerate(mixed(np.uint64(key), np.uint64(rows[r]), np.uint64(block))):
                if block * 4 + j < width:
                    out[r * width + block * 4 + j] = word


@register_jitable
def fraction(high: Any, low: Any) -> Any:
    return (np.float64(np.int32(high >> np.uint64(5))) * 67108864.0 + np.float64(np.int32(low >> np.uint64(6)))) \
        * (1.0 / 9007199254740992.0)


@register_jitable
def log_of(x: Any) -> Any:
    """log x for a normal number x > 0; the polynomial is that of fdlibm (Sun Microsystems, 1993)."""
    bits = bits_of(x)
    k = np.int32(bits >> np.uint64(52)) - 1023
    m = number_of((bits & np.uint64(0xFFFFFFFFFFFFF)) | np.uint64(0x3FF0000000000000))
    large = m > 1.4142135623730951
    m = choose(large, 0.5 * m, m)
    n = np.float64(k) + choose(large, 1.0, 0.0)
    g = m - 1.0
    s = g / (2.0 + g)
    z = s * s
    half = 0.5 * g * g
    r = 1.479819860511658591e-01
    r = r * z + 1.531383769920937332e-01
    r = r * z + 1.818357216161805012e-01
    r = r * z + 2.222219843214978396e-01
    r = r * z + 2.857142874366239149e-01
    r = r * z + 3.999999999940941908e-01
    r = r * z + 6.666666666666735130e-01
    return n * 6.93147180369123816490e-01 - ((half - (s * (half + r * z) + n * 1.90821492927058770002e-10)) - g)


@register_jitable
def cos_of_turns(u: Any) -> Any:
    """cos(2 pi u) for u in [0, 1); polynomials of fdlibm."""
    quarter = np.int32(4.0 * u + 0.5)
    a = (u - 0.25 * quarter) * 6.283185307179586
    z = a * a
    s = 1.58969099521155010221e-10
    s = s * z - 2.50507602534068634195e-08
    s = s * z + 2.75573137070700676789e-06
    s = s * z - 1.98412698298579493134e-04
    s = s * z + 8.33333333332248946124e-03
    s = s * z - 1.66666666666666324348e-01
    c = -1.13596475577881948265e-11
    c = c * z + 2.08757232129817482790e-09
    c = c * z - 2.75573143513906633035e-07
    c = c * z + 2.48015872894767294178e-05
    c = c * z - 1.38888888888741095749e-03
    c = c * z + 4.16666666666666019037e-02
    sine = a + a * z * s
    cosine = 1.0 - (0.5 * z - z * z * c)
    result = choose(quarter % 2 == 1, sine, cosine)
    return choose((quarter == 1) | (quarter == 2), -result, result)


def random_uniform(out: Any, key: int, start: int, n: int) -> None:
    for i in range(n):
        w0, w1, _, _ = mixed(np.uint64(key), np.uint64(start) + np.uint64(i), np.uint64(0))
        out[i] = fraction(w0, w1)


def random_normal(out: Any, key: int, start: int, n: int) -> None:
    for i in range(n):
        w0, w1, w2, w3 = mixed(np.uint64(key), np.uint64(start) + np.uint64(i), np.uint64(0))
        out[i] = math.sqrt(-2.0 * log_of(1.0 - fraction(w0, w1))) * cos_of_turns(fraction(w2, w3))
