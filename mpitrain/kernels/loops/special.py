"""Error functions, gamma functions and their kin as in native/special.c, with its operations in its order: the same bits, but where
logarithms and sines of the C library are in them, below 1/2 in the gamma functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from mpitrain.kernels.loops.mathematics import (
    bits_of,
    choose,
    d,
    exp,
    exp_of_negative,
    fma,
    number_of,
    overload,
    polynomial,
    u,
)

PART = 512
MIDDLE = 3.75                                     # of the tail's variable, where it is 0
HALF, ONE = np.uint64(0x3FE6A09E667F3BCD), np.uint64(0x3FF0000000000000)            # sqrt(1/2) and 1
LIFT = np.uint64(int(ONE) - int(HALF))
FRACTION, POWER, PLACES = np.uint64(0x000FFFFFFFFFFFFF), np.uint64(0x4330000000000000), np.uint64(52)

# Of the highest power first. What each is of, native/special.c says.
tail_short = polynomial(
    -4.653548394336575e-06, 2.775548976781647e-05, 5.362508895960511e-06, -0.00033603674882448387, 0.0007982038653053024,
    0.000977975136166676, -0.012537028854586473, 0.04912166133723868, -0.13195521288827483, 0.2790615727151769,
    -0.49047030287734833, 0.7363189548628366, -0.958741576534027, 1.0919229092605853)
tail_long = polynomial(
    -2.428383181037169e-10, -2.8317431223875074e-09, 2.846149608785993e-09, 3.3853101478493466e-08, -2.6092739883306852e-08,
    -2.543003175072746e-07, 2.788860619761132e-07, 1.6474463894957575e-06, -3.288762429350935e-06, -8.89886673862872e-06,
    3.747141362441219e-05, 1.0592041305059113e-05, -0.00034864677629479736, 0.0007948235779689006, 0.000986338067815038,
    -0.012535880112698615, 0.04911877861624072, -0.13195540117257462, 0.2790620490337476, -0.4904702912079074, 0.736318925221752,
    -0.9587415766529069, 1.0919229095627891)
near_zero_short = polynomial(
    -9.667044571486996e-06, 0.00011265959025606609, -0.0008484080405535107, 0.005221031807858023, -0.026865430727670243,
    0.11283782495236845, -0.3761263846802871, 1.1283791670615435)
near_zero_long = polynomial(
    5.957176147748911e-11, -1.1372848856791674e-09, 1.4659775274047436e-08, -1.6350312701054695e-07, 1.6461000484121368e-06,
    -1.4925595266831182e-05, 0.0001205533111164271, -0.000854832698083379, 0.0052239776248180145, -0.026866170645076792,
    0.11283791670954879, -0.3761263890318375, 1.1283791670955126)
twice_atanh = polynomial(
    0.13265527927388243, 0.13248384848961497, 0.15387177822275883, 0.1818177334703648, 0.2222222268191142, 0.285714285687849,
    0.4000000000000761, 0.6666666666666666, 2.0)
inverse_near = polynomial(
    1.2961748038399046e-13, -4.2547195411062805e-12, 4.113986328313992e-11, 2.194955842072562e-10, -8.216312775867829e-09,
    7.123000315131555e-08, -1.9980631893305613e-07, -6.469865321791876e-07, 1.4599412449837903e-06, 4.718717499939352e-05,
    -0.00012842440705283567, -0.0023349510636824864, 0.011549311076622146, 0.23201366903535806, 0.8862269254193818)
inverse_far = polynomial(
    -2.1130084309039992e-08, 1.3576167260178913e-06, -4.0300200400362636e-05, 0.0007323308646860562, -0.009097495212038594,
    0.08168534597929253, -0.5463102803494456, 2.7621872333885937, -10.596693659393006, 30.64374421156791, -65.59586324225067,
    100.42223029651119, -103.3322475707339, 64.3198041389436, -17.264520682851675)
stirling_series = polynomial(
    -3617 / 122400, 1 / 156, -691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12)
digamma_series = polynomial(
    3617 / 8160, -1 / 12, 691 / 32760, -1 / 132, 1 / 240, -1 / 252, 1 / 120, -1 / 12)
trigamma_series = polynomial(
    -3617 / 510, 7 / 6, -691 / 2730, 5 / 66, -1 / 30, 1 / 42, -1 / 30, 1 / 6)


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


def _stirling_by(log: Any) -> Any:
    @register_jitable
    def stirling(z: Any) -> Any:
        """Stirling's series from 8 on; below that the product that leads there is divided away."""
        shifted = z + 8.0 * choose(z < 8.0, 1.0, 0.0)
        r = 1.0 / shifted
        t = r * r
        product = z * (z + 1.0) * (z + 2.0) * (z + 3.0) * ((z + 4.0) * (z + 5.0) * (z + 6.0) * (z + 7.0))
        product = choose(z < 8.0, product, 1.0)
        return (shifted - 0.5) * log(shifted) - shifted + 0.918938533204672742 + stirling_series(t) * r - log(product)
    return stirling


def _digamma_by(log: Any) -> Any:
    @register_jitable
    def digamma_of_positive(x: Any) -> Any:
        """The asymptotic series from 12 on, and the recurrence that leads there."""
        total = 0.0
        for _ in range(12):
            below = choose(x < 12.0, 1.0, 0.0)
            total += below / x
            x += below
        r = 1.0 / x
        t = r * r
        return log(x) - 0.5 * r + digamma_series(t) * t - total
    return digamma_of_positive


_log = register_jitable(lambda x: math.log(x))
_stirling, _stirling_slow = _stirling_by(log_of), _stirling_by(_log)
_digamma, _digamma_slow = _digamma_by(log_of), _digamma_by(_log)


@register_jitable
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
        return _stirling_slow(x)
    return math.log(math.pi / abs(math.sin(math.pi * (x - np.rint(x))))) - _stirling_slow(1.0 - x)


@register_jitable
def _digamma_anywhere(x: Any) -> Any:
    if not x < 0.5:
        return _digamma_slow(x)
    if x == 0:
        return math.copysign(math.inf, -x)
    if x == np.floor(x):
        return math.nan
    return _digamma_slow(1.0 - x) - math.pi / math.tan(math.pi * (x - np.rint(x)))


@register_jitable
def _trigamma_anywhere(x: Any) -> Any:
    if not x < 0.5:
        return 0.0 if x > 1e300 else _trigamma(x)
    sine = math.sin(math.pi * (x - np.rint(x)))
    return math.pi * math.pi / (sine * sine) - _trigamma(1.0 - x)


def erf(x: Any, y: Any, n: int) -> None:
    for i in range(n):
        y[u(i)] = _erf(d(x[u(i)]), x[u(i)])


def erfc(x: Any, y: Any, n: int) -> None:
    for i in range(n):
        y[u(i)] = _erfc(d(x[u(i)]), x[u(i)])


def erfcx(x: Any, y: Any, n: int) -> None:
    for i in range(n):
        y[u(i)] = _erfcx(d(x[u(i)]), x[u(i)])


def erfinv(x: Any, y: Any, n: int) -> None:
    for i in range(n):
        y[u(i)] = _erfinv(d(x[u(i)]), x[u(i)])


@register_jitable
def _is_fast(x: Any) -> Any:
    return (x >= 1e-150) & (x <= 1e150)


def lgamma(x: Any, y: Any, n: int) -> None:
    for first in range(0, n, PART):
        last = min(n, first + PART)
        for i in range(first, last):
            v = d(x[u(i)])
            y[u(i)] = _stirling(choose(_is_fast(v), v, 1.0))
        for i in range(first, last):
            if not _is_fast(d(x[u(i)])):
                y[u(i)] = _lgamma_anywhere(d(x[u(i)]))


def digamma(x: Any, y: Any, n: int) -> None:
    for first in range(0, n, PART):
        last = min(n, first + PART)
        for i in range(first, last):
            v = d(x[u(i)])
            y[u(i)] = _digamma(choose(_is_fast(v), v, 1.0))
        for i in range(first, last):
            if not _is_fast(d(x[u(i)])):
                y[u(i)] = _digamma_anywhere(d(x[u(i)]))


def trigamma(x: Any, y: Any, n: int) -> None:
    for first in range(0, n, PART):
        last = min(n, first + PART)
        for i in range(first, last):
            v = d(x[u(i)])
            y[u(i)] = _trigamma(choose(_is_fast(v), v, 1.0))
        for i in range(first, last):
            if not _is_fast(d(x[u(i)])):
                y[u(i)] = _trigamma_anywhere(d(x[u(i)]))
