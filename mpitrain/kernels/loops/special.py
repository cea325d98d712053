"""Error functions, gamma functions and their kin as in native/special.c, with its operations in its order: the same bits, but
where logarithms and sines of the C library are in them, below 1/2 in the gamma functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from mpitrain.kernels.kernel import Function
from mpitrain.kernels.loops.mathematics import (
    bits_of,
    choose,
    d,
    exp,
    exp_of_negative,
    fma,
    number_of,
    overload,
    u,
)
from mpitrain.kernels.loops.polynomials import (
    digamma_series,
    inverse_far,
    inverse_near,
    near_zero_long,
    near_zero_short,
    next_to_two,
    stirling_series,
    tail_long,
    tail_short,
    trigamma_series,
    twice_atanh,
)

PART = 512
MIDDLE = 3.75                                     # of the tail's variable, where it is 0
HALF, ONE = np.uint64(0x3FE6A09E667F3BCD), np.uint64(0x3FF0000000000000)            # sqrt(1/2) and 1
LIFT = np.uint64(int(ONE) - int(HALF))
FRACTION, POWER, PLACES = np.uint64(0x000FFFFFFFFFFFFF), np.uint64(0x4330000000000000), np.uint64(52)

def tail(t: Any, like: Any) -> Any: ...
def near_zero(t: Any, like: Any) -> Any: ...
def refined(y: Any, size: Any, like: Any) -> Any: ...


@overload(tail)
def _tail(t: Any, like: Any) -> Any:
    """(x + 3.75) exp(x^2) erfc(x) of t = (x - 3.75) / (x + 3.75), x >= 0, as exact as `like` needs it."""
    def single(t: Any, like: Any) -> Any:
        return tail_short(t)

    def double(t: Any, like: Any) -> Any:
        return tail_long(t)
    return single if like == types.float32 else double


@overload(near_zero)
def _near_zero(t: Any, like: Any) -> Any:
    """erf(x) / x of t = x^2 <= 1."""
    def single(t: Any, like: Any) -> Any:
        return near_zero_short(t)

    def double(t: Any, like: Any) -> Any:
        return near_zero_long(t)
    return single if like == types.float32 else double


@register_jitable
def log_of(x: Any) -> Any:
    """log(x) of a normal x > 0: 2^n m, m from sqrt(1/2) to sqrt(2)."""
    bits = bits_of(x) + LIFT
    n = number_of((bits >> PLACES) | POWER) - 4503599627371519.0
    m = number_of((bits & FRACTION) + HALF)
    s = (m - 1.0) / (m + 1.0)
    return fma(n, 0.693147180369123816, fma(s, twice_atanh(s * s), n * 1.90821492927058770e-10))


@register_jitable
def _scaled_tail(x: Any, like: Any) -> Any:
    """exp(x^2) erfc(x), x >= 0."""
    y = 1.0 / (x + MIDDLE)
    return y * tail(fma(-2.0 * MIDDLE, y, 1.0), like)


@register_jitable
def _bell(x: Any) -> Any:
    """exp(-x^2) with what x^2 is rounded by; below exp(-700) in two factors, since the first would be denormal."""
    square = x * x
    lost = fma(x, x, -square)
    over, scale = choose(square > 700.0, 600.0, 0.0), choose(square > 700.0, 2.6503965530043108e-261, 1.0)
    return exp_of_negative(over - square) * scale * (1.0 - lost)


@register_jitable
def _erfc(x: Any, like: Any) -> Any:
    size = abs(x)
    size = choose(size > 30.0, 30.0, size)
    rest = _bell(size) * _scaled_tail(size, like)
    return choose(x < 0, 2.0 - rest, rest)


@register_jitable
def _erf(x: Any, like: Any) -> Any:
    near = x * near_zero(x * x, like)
    return choose(abs(x) < 1.0, near, math.copysign(1.0 - _erfc(abs(x), like), x))


@register_jitable
def _erfcx(x: Any, like: Any) -> Any:
    size = abs(x)
    rest = _scaled_tail(size, like)
    most = choose(size > 30.0, 30.0, size)
    square = most * most
    whole = 2.0 * exp(square) * (1.0 + fma(most, most, -square))
    return choose(x < 0, whole - rest, rest)


@overload(refined)
def _refined(y: Any, size: Any, like: Any) -> Any:
    """One step of Halley, which triples the digits of erfinv; float32 has them before it."""
    def single(y: Any, size: Any, like: Any) -> Any:
        return y

    def double(y: Any, size: Any, like: Any) -> Any:
        gap = choose(size < 0.5, _erf(y, like) - size, (1.0 - size) - _erfc(y, like))
        gap *= 0.886226925452758014 * exp(y * y)
        return y - gap / fma(y, gap, 1.0)
    return single if like == types.float32 else double


@register_jitable
def _erfinv(x: Any, like: Any) -> Any:
    size = abs(x)
    w = -log_of((1.0 - size) * (1.0 + size))
    y = refined(size * choose(w < 6.0, inverse_near(w), inverse_far(math.sqrt(w))), size, like)
    return math.copysign(choose(size < 1.0, y, choose(size == 1.0, math.inf, math.nan)), x)


@register_jitable(forceinline=True)
def _log(x: Any, fast: bool) -> Any:
    return log_of(x) if fast else math.log(x)


@register_jitable(forceinline=True)
def _stirling(z: Any, fast: bool) -> Any:
    """Stirling's series from 8 on; below that the product that leads there is divided away; a polynomial next to 1 and 2."""
    shifted = z + 8.0 * choose(z < 8.0, 1.0, 0.0)
    r = 1.0 / shifted
    t = r * r
    product = z * (z + 1.0) * (z + 2.0) * (z + 3.0) * ((z + 4.0) * (z + 5.0) * (z + 6.0) * (z + 7.0))
    near = (z >= 0.5) & (z <= 2.5)
    product = choose(near, choose(z < 1.5, z, 1.0), choose(z < 8.0, product, 1.0))
    far = (shifted - 0.5) * _log(shifted, fast) - shifted + 0.918938533204672742 + stirling_series(t) * r
    from_root, low = choose(z < 1.5, z - 1.0, z - 2.0), _log(product, fast)
    return choose(near, fma(from_root, next_to_two(from_root), -low), far - low)


@register_jitable(forceinline=True)
def _recurrence(x: Any, fast: bool) -> Any:
    """The asymptotic series of digamma from 12 on, and the recurrence that leads there."""
    total = 0.0
    for _ in range(12):
        below = choose(x < 12.0, 1.0, 0.0)
        total += below / x
        x += below
    r = 1.0 / x
    t = r * r
    return _log(x, fast) - 0.5 * r + digamma_series(t) * t - total


@register_jitable(forceinline=True)
def _lgamma(x: Any) -> Any:
    return _stirling(x, True)


@register_jitable(forceinline=True)
def _digamma(x: Any) -> Any:
    return _recurrence(x, True)


@register_jitable(forceinline=True)
def _trigamma(x: Any) -> Any:
    total = 0.0
    for _ in range(12):
        below = choose(x < 12.0, 1.0, 0.0)
        y = 1.0 / x
        total = fma(below * y, y, total)
        x += below
    r = 1.0 / x
    t = r * r
    return fma(trigamma_series(t) * t, r, fma(0.5, t, r)) + total


@register_jitable
def _lgamma_anywhere(x: Any) -> Any:
    """Of any x; below 1/2 by reflection, as the two after it."""
    if math.isinf(x):
        return math.inf
    if not x < 0.5:
        return _stirling(x, False)
    return math.log(math.pi / abs(math.sin(math.pi * (x - np.rint(x))))) - _stirling(1.0 - x, False)


@register_jitable
def _digamma_anywhere(x: Any) -> Any:
    if not x < 0.5:
        return _recurrence(x, False)
    if x == 0:
        return math.copysign(math.inf, -x)
    if x == np.floor(x):
        return math.nan
    return _recurrence(1.0 - x, False) - math.pi / math.tan(math.pi * (x - np.rint(x)))


@register_jitable
def _trigamma_anywhere(x: Any) -> Any:
    if not x < 0.5:
        return 0.0 if x > 1e300 else _trigamma(x)
    sine = math.sin(math.pi * (x - np.rint(x)))
    return math.pi * math.pi / (sine * sine) - _trigamma(1.0 - x)


def values(of: Function) -> Function:
    """y = `of` each number of x, as exact as its type needs it."""
    def run(x: Any, y: Any, n: int) -> None:
        for i in range(n):
            y[u(i)] = of(d(x[u(i)]), x[u(i)])
    return run


erf, erfc, erfcx, erfinv = map(values, (_erf, _erfc, _erfcx, _erfinv))


@register_jitable
def _is_fast(x: Any) -> Any:
    return (x >= 1e-150) & (x <= 1e150)


def gammas(of: Function, anywhere: Function) -> Function:
    """y = `of` each number of x that is fast, and `anywhere` of the others."""
    def run(x: Any, y: Any, n: int) -> None:
        for first in range(0, n, PART):
            last = min(n, first + PART)
            for i in range(first, last):
                v = d(x[u(i)])
                y[u(i)] = of(choose(_is_fast(v), v, 1.0))
            for i in range(first, last):
                if not _is_fast(d(x[u(i)])):
                    y[u(i)] = anywhere(d(x[u(i)]))
    return run


lgamma = gammas(_lgamma, _lgamma_anywhere)
digamma = gammas(_digamma, _digamma_anywhere)
trigamma = gammas(_trigamma, _trigamma_anywhere)
