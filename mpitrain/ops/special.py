"""Error functions, gamma functions and their kin, to the last digits of float64 with array expressions alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.choice import where
from mpitrain.ops.comparison import equal, greater, less
from mpitrain.ops.elementwise import log
from mpitrain.ops.inputs import as_tensor, float_tensor, floating
from mpitrain.ops.logic import isnan
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.shape import reshape
from mpitrain.ops.unary import log1p, sin

__all__ = ["digamma", "entr", "erf", "erfc", "erfcx", "erfinv", "lgamma", "log_ndtr", "logit", "mvlgamma", "nan_to_num",
           "ndtr", "polygamma", "sinc"]

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


class Special(Function):
    """A function of each element: `value(xp, x)`, and `slope(module, x)`, an expression that arrays and tensors both take."""

    value: Callable[[Any, Any], Any]
    slope: Callable[[Any, Any], Any]

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        x = floating(ctx.function.__name__.lower(), x)
        ctx.save(x)
        with np.errstate(all="ignore"):           # the branch that is not taken divides by 0, and overflows
            return ctx.xp.asarray(ctx.function.value(ctx.xp, x)).astype(x.dtype)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            return grad * ctx.function.slope(sys.modules[__package__], ctx.input(0))


def special(name: str, value: Callable[[Any, Any], Any], slope: Callable[[Any, Any], Any], doc: str) -> Callable[[Any], Tensor]:
    """An op of this name; see `Special`."""
    function: Any = type(name.capitalize(), (Special,), {
        "value": staticmethod(value), "slope": staticmethod(slope), "__doc__": doc})

    def op(x: Any) -> Tensor:
        return function.apply(as_tensor(x))
    op.__name__ = op.__qualname__ = name
    op.__doc__ = doc
    return op


def _scaled(xp: Any, x: Array) -> Array:
    """exp(x^2) erfc(x) of x >= 0: Clenshaw's sum."""
    t = 1 - 7.5 / (x + 3.75)
    later = last = 0.0
    for coefficient in ERFCX[:0:-1] if x.dtype == "float64" else ERFCX[14:0:-1]:
        later, last = coefficient + 2 * t * later - last, later
    return (ERFCX[0] + t * later - last) / (1 + 2 * x)


def _erfc(xp: Any, x: Array) -> Array:
    size = xp.abs(x)
    tail = xp.exp(-size * size) * _scaled(xp, size)
    return xp.where(x < 0, 2 - tail, tail)


def _erf(xp: Any, x: Array) -> Array:
    square, near = x * x, xp.zeros_like(x)
    for n in range(12, -1, -1):                   # the power series, exact below 1/2
        near = 1 / (math.factorial(n) * (2 * n + 1)) - near * square
    return xp.where(square < 0.25, x * near * TWO_OVER_ROOT_PI, xp.sign(x) * (1 - _erfc(xp, xp.abs(x))))


def _erfcx(xp: Any, x: Array) -> Array:
    tail = _scaled(xp, xp.abs(x))
    return xp.where(x < 0, 2 * xp.exp(x * x) - tail, tail)


def _erfinv(xp: Any, x: Array) -> Array:
    """Winitzki's guess, to 2e-3, and two steps of Halley, each of which triples the digits."""
    x = x.astype("float64")
    size = xp.abs(x)
    beyond = xp.log((1 - size) * (1 + size))
    half = 2 / (math.pi * 0.147) + beyond / 2
    y = xp.sqrt(xp.sqrt(half * half - beyond / 0.147) - half)
    for _ in range(2):
        gap = xp.where(size < 0.5, _erf(xp, y) - size, (1 - size) - _erfc(xp, y)) / (TWO_OVER_ROOT_PI * xp.exp(-y * y))
        y = y - gap / (1 + y * gap)
    return xp.where(size < 1, xp.copysign(y, x), xp.where(size == 1, xp.copysign(math.inf, x), math.nan))


def _lgamma(xp: Any, x: Array) -> Array:
    """Stirling's series from 8 on; below that the product that leads there is divided away; 1 - x for x < 1/2."""
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
    sine = xp.abs(xp.sin(math.pi * (x - xp.rint(x))))
    return xp.where(xp.isinf(x), math.inf, xp.where(x < 0.5, xp.log(math.pi / sine) - result, result))


def _polygamma(xp: Any, n: int, x: Array) -> Array:
    """The asymptotic series from 12 on, and the recurrence that leads there; below 1/2 by reflection for n = 0 and 1."""
    x = x.astype("float64")
    z = xp.where(x < 0.5, 1 - x, x) if n < 2 else x
    sign, factorial = (-1.0) ** (n + 1), math.factorial(n)
    lowest = float(xp.min(xp.where(xp.isfinite(z), z, 12))) if z.size else 12.0
    steps = max(0, math.ceil(12 - max(lowest, -1000.0)))
    total, shifted = xp.zeros_like(z), z
    for _ in range(steps):
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
    return xp.where(x < -1000, math.nan, result)


erf = special("erf", _erf, lambda m, x: TWO_OVER_ROOT_PI * m.exp(-x * x),
              "The error function, 2 / sqrt(pi) int_0^x exp(-t^2) dt.")
erfc = special("erfc", _erfc, lambda m, x: -TWO_OVER_ROOT_PI * m.exp(-x * x), "1 - erf(x), exact also where that is small.")
erfcx = special("erfcx", _erfcx, lambda m, x: 2 * x * m.erfcx(x) - TWO_OVER_ROOT_PI, "exp(x^2) erfc(x).")
erfinv = special("erfinv", _erfinv, lambda m, x: 1 / TWO_OVER_ROOT_PI * m.exp(m.erfinv(x) * m.erfinv(x)),
                 "The number whose error function is x, of -1 ... 1.")
lgamma = special("lgamma", _lgamma, lambda m, x: m.digamma(x), "log |gamma(x)|.")
digamma = special("digamma", lambda xp, x: _polygamma(xp, 0, x), lambda m, x: m.polygamma(1, x), "The derivative of `lgamma`.")


class Polygamma(Function):
    @staticmethod
    def forward(ctx: Context, x: Array, *, n: int) -> Array:
        x = floating("polygamma", x)
        ctx.n = n
        ctx.save(x)
        with np.errstate(all="ignore"):
            return ctx.xp.asarray(_polygamma(ctx.xp, n, x)).astype(x.dtype)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad * polygamma(ctx.n + 1, ctx.input(0))


def polygamma(n: int, x: Any) -> Tensor:
    """The n-th derivative of `digamma`; NaN below -1000 for n of 2 and more."""
    if not isinstance(n, int) or n < 0:
        raise ShapeError(f"polygamma: n is {n!r}, expected an integer of 0 or more")
    return Polygamma.apply(as_tensor(x), n=n)


def mvlgamma(x: Any, p: int) -> Tensor:
    """The logarithm of the multivariate gamma function of dimension p, of x > (p - 1) / 2."""
    x = as_tensor(x)
    if p < 1:
        raise ShapeError(f"mvlgamma: p is {p}, expected 1 or more")
    shifts = Tensor((-0.5 * x.xp.arange(p)).astype(x.dtype if x.dtype.kind == "f" else "float32"))
    return total(lgamma(reshape(x, (*x.shape, 1)) + shifts), -1) + p * (p - 1) / 4 * math.log(math.pi)


def sinc(x: Any) -> Tensor:
    """sin(pi x) / (pi x), 1 at 0."""
    x = float_tensor("sinc", x)
    none = equal(x, 0)
    angle = where(none, 1.0, x) * math.pi
    return where(none, 1.0, sin(angle) / angle)


def logit(x: Any, eps: float | None = None) -> Tensor:
    """log(x / (1 - x)), of x limited to [eps, 1 - eps] where eps is given."""
    x = float_tensor("logit", x)
    if eps is not None:
        low, high = x.dtype.type(eps), x.dtype.type(1 - eps)
        x = where(less(x, eps), low, where(greater(x, 1 - eps), high, x))
    with np.errstate(all="ignore"):
        return log(x / (1.0 - x))


def nan_to_num(x: Any, nan: float | None = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """`x` with numbers in place of NaN and infinities: 0, and the largest and the smallest there are."""
    x = as_tensor(x)
    if x.dtype.kind != "f":
        return x
    ends = np.finfo(x.dtype)
    kind = x.dtype.type
    x = where(isnan(x), kind(0.0 if nan is None else nan), x)
    x = where(equal(x, math.inf), ends.max if posinf is None else kind(posinf), x)
    return where(equal(x, -math.inf), ends.min if neginf is None else kind(neginf), x)


def entr(x: Any) -> Tensor:
    """-x log(x), 0 at 0, and -inf below."""
    x = float_tensor("entr", x)
    kind, positive = x.dtype.type, greater(x, 0)
    inside = where(positive, x, kind(1))
    result = where(positive, -inside * log(inside), where(equal(x, 0), kind(0), kind(-math.inf)))
    return where(isnan(x), x, result)


def ndtr(x: Any) -> Tensor:
    """The share of the standard normal distribution that is below x."""
    return erfc(float_tensor("ndtr", x) * -math.sqrt(0.5)) * 0.5


def log_ndtr(x: Any) -> Tensor:
    """log(ndtr(x)), exact also where that is small."""
    x = float_tensor("log_ndtr", x)
    kind, low = x.dtype.type, less(x, -1)
    below, above = where(low, x, kind(-1)), where(low, kind(-1), x)
    tail = log(erfcx(below * -math.sqrt(0.5)) * 0.5) - below * below * 0.5
    return where(low, tail, log1p(erfc(above * math.sqrt(0.5)) * -0.5))
