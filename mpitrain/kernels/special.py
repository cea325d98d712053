"""Error functions, gamma functions and their kin, element by element, to the last digits of float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host, packed, suits_c

TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)      # B_2, B_4, ...

# (1 + 2x) exp(x^2) erfc(x), x >= 0, in Chebyshev polynomials of (x - 3.75) / (x + 3.75): Shepherd and Laframboise, 1981. The
# coefficients were computed with 40 digits by Python's mpmath.
ERFCX = (
    1.17757893456740175, -0.0045900545806464773309, -0.084249133366517915584, 0.059209939998191890498, -0.026658668435305752277,
    0.0090749976707052650939, -0.0024131635404176081909, 0.00049077583652580863229, -0.000069169733025012063671,
    4.1390279860730101675e-6, 7.7403830661984906686e-7, -2.1886401049234395661e-7, 1.0764999465670910377e-8,
    4.5219598112182868979e-9, -7.7544002088313511065e-10, -6.3180883408866844944e-11, 2.8687950109306698981e-11,
    1.945586854577734723e-13, -9.6546967484334389059e-13, 3.2525481481487398415e-14, 3.3478119482868053878e-14,
    -1.8645628804193131016e-15, -1.2507950530688647086e-15, 7.4182352566240434579e-17)

# log(Gamma(2 + t)) / t, |t| <= 1/2, to 2e-17: interpolated at Chebyshev nodes with 40 digits by mpmath.
NEXT_TO_TWO = (
    2.7475390051909663e-07, -5.811277768921246e-07, 9.242852225162277e-07, -1.9743106888421067e-06, 4.3828545383846665e-06,
    -9.45628851510172e-06, 2.050601970174762e-05, -4.4923727564247656e-05, 9.945761692157133e-05, -0.00022315497746292723,
    0.0005096695196526673, -0.0011927539009983087, 0.002890510330865901, -0.007385551028935545, 0.02058080842778338,
    -0.06735230105319563, 0.3224670334241132, 0.42278433509846713)


def _square(x: Array) -> tuple[Array, Array]:
    """(x^2, what that is rounded by): Dekker's product. exp makes 500 units of it. From 30 on, 30's: exp(-x^2) is 0."""
    x = array_module(x).minimum(x, 30.0)
    high = x * 134217729.0
    high = high - (high - x)
    low, square = x - high, x * x
    return square, ((high * high - square) + 2 * high * low) + low * low


def _scaled(x: Array) -> Array:
    """exp(x^2) erfc(x) of x >= 0: Clenshaw's sum."""
    t = 1 - 7.5 / (x + 3.75)
    later = last = 0.0
    for coefficient in ERFCX[:0:-1]:
        later, last = coefficient + 2 * t * later - last, later
    return (ERFCX[0] + t * later - last) / (1 + 2 * x)


def _erfc(x: Array) -> Array:
    xp = array_module(x)
    x = x.astype("float64")
    square, lost = _square(xp.abs(x))
    tail = xp.exp(-square) * (1 - lost) * _scaled(xp.abs(x))
    return xp.where(x < 0, 2 - tail, tail)


def _erf(x: Array) -> Array:
    xp = array_module(x)
    x = x.astype("float64")
    square, near = x * x, xp.zeros_like(x)
    for n in range(12, -1, -1):                   # the power series, exact below 1/2
        near = 1 / (math.factorial(n) * (2 * n + 1)) - near * square
    return xp.where(square < 0.25, x * near * TWO_OVER_ROOT_PI, xp.sign(x) * (1 - _erfc(xp.abs(x))))


def _erfcx(x: Array) -> Array:
    xp = array_module(x)
    x = x.astype("float64")
    square, lost = _square(xp.abs(x))
    tail = _scaled(xp.abs(x))
    return xp.where(x < 0, 2 * xp.exp(square) * (1 + lost) - tail, tail)


def _erfinv(x: Array) -> Array:
    """Winitzki's guess, to 2e-3, and two steps of Halley, each of which triples the digits."""
    xp = array_module(x)
    x = x.astype("float64")
    size = xp.abs(x)
    beyond = xp.log((1 - size) * (1 + size))
    half = 2 / (math.pi * 0.147) + beyond / 2
    y = xp.sqrt(xp.sqrt(half * half - beyond / 0.147) - half)
    for _ in range(2):
        gap = xp.where(size < 0.5, _erf(y) - size, (1 - size) - _erfc(y)) / (TWO_OVER_ROOT_PI * xp.exp(-y * y))
        y = y - gap / (1 + y * gap)
    return xp.where(size < 1, xp.copysign(y, x), xp.where(size == 1, xp.copysign(math.inf, x), math.nan))


def _lgamma(x: Array) -> Array:
    """Stirling's series from 8 on; below that the product that leads there is divided away, and next to 1 and 2, where that would
    leave the rounding of large terms instead of 0, a polynomial; 1 - x for x < 1/2."""
    xp = array_module(x)
    x = x.astype("float64")
    z = xp.where(x < 0.5, 1 - x, x)
    small, shifted, product = z < 8, xp.where(z < 8, z + 8, z), xp.ones_like(z)
    for i in range(8):
        product = product * xp.where(small, z + i, 1)
    series, power = xp.zeros_like(z), 1 / shifted
    for k, b in enumerate(BERNOULLI, 1):
        series = series + b / (2 * k * (2 * k - 1)) * power
        power = power / (shifted * shifted)
    result = (shifted - 0.5) * xp.log(shifted) - shifted + 0.5 * math.log(2 * math.pi) + series - xp.log(product)
    t, near = z - xp.where(z < 1.5, 1, 2), xp.zeros_like(z)
    for coefficient in NEXT_TO_TWO:
        near = near * t + coefficient
    result = xp.where((z >= 0.5) & (z <= 2.5), t * near - xp.log(xp.where(z < 1.5, z, 1)), result)
    sine = xp.abs(xp.sin(math.pi * (x - xp.rint(x))))
    return xp.where(xp.isinf(x), math.inf, xp.where(x < 0.5, xp.log(math.pi / sine) - result, result))


def polygamma(n: int, x: Array) -> Array:
    """The asymptotic series from 12 on, and the recurrence that leads there; below 1/2 by reflection."""
    xp = array_module(x)
    x = x.astype("float64")
    z = xp.where(x < 0.5, 1 - x, x)
    sign, factorial = (-1.0) ** (n + 1), math.factorial(n)
    total, shifted = xp.zeros_like(z), z
    for _ in range(12):
        below = shifted < 12
        total = total + xp.where(below, 1 / shifted ** (n + 1), 0)
        shifted = xp.where(below, shifted + 1, shifted)
    if n == 0:
        series = xp.log(shifted) - 0.5 / shifted
        for k, b in enumerate(BERNOULLI, 1):
            series = series - b / (2 * k * shifted ** (2 * k))
        result = series - total
        whole = x == xp.floor(x)
        reflected = result - math.pi / xp.tan(math.pi * (x - xp.rint(x)))
        reflected = xp.where(x == 0, xp.copysign(math.inf, -x), xp.where(whole, math.nan, reflected))
        return xp.where(x < 0.5, reflected, result)
    series = math.factorial(n - 1) / shifted ** n + factorial / (2 * shifted ** (n + 1))
    for k, b in enumerate(BERNOULLI, 1):
        series = series + b * (math.factorial(2 * k + n - 1) / math.factorial(2 * k)) / shifted ** (2 * k + n)
    result = sign * (series + factorial * total)
    if n == 1:
        sine = xp.sin(math.pi * (x - xp.rint(x)))
        return xp.where(x < 0.5, math.pi ** 2 / (sine * sine) - result, result)
    reflected = (-1) ** n * result - math.pi ** (n + 1) * _cotangent(xp, n, math.pi * (x - xp.rint(x)))
    return xp.where(x < 0.5, xp.where((x == xp.floor(x)) & xp.isfinite(x), sign * math.inf, reflected), result)


def _cotangent(xp: Any, n: int, angle: Array) -> Array:
    """The n-th derivative of the cotangent, a polynomial in it: c' = -1 - c^2."""
    coefficients = np.polynomial.Polynomial([0, 1])
    for _ in range(n):
        coefficients = -coefficients.deriv() * np.polynomial.Polynomial([1, 0, 1])
    c, result = 1 / xp.tan(angle), xp.zeros_like(angle)
    for k in coefficients.coef[::-1]:
        result = result * c + k
    return result


def _kernel(name: str, value: Callable[[Array], Array]) -> Kernel:
    def reference(x: Array) -> Array:
        with np.errstate(all="ignore"):           # the branch that is not taken divides by 0, and overflows
            return array_module(x).asarray(value(x)).astype(x.dtype)

    @host("special", name, "X:n X!:n in")
    def run(call: CFunction, x: Array) -> Array:
        if not suits_c(x):
            return reference(x)
        result = np.empty(x.shape, x.dtype)
        call(packed(x), result, x.size)
        return result
    return Kernel(name, reference, run, run.loop("special"))


erf, erfc, erfcx = _kernel("erf", _erf), _kernel("erfc", _erfc), _kernel("erfcx", _erfcx)
erfinv, lgamma = _kernel("erfinv", _erfinv), _kernel("lgamma", _lgamma)
digamma, trigamma = _kernel("digamma", lambda x: polygamma(0, x)), _kernel("trigamma", lambda x: polygamma(1, x))
