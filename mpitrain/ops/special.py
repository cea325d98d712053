"""Error functions, gamma functions and their kin, to the last digits of float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, array_module, is_float
from mpitrain.errors import ShapeError
from mpitrain.kernels import special as kernels
from mpitrain.kernels.elementwise import replace
from mpitrain.ops.choice import where
from mpitrain.ops.comparison import equal, greater, less
from mpitrain.ops.elementwise import log
from mpitrain.ops.inputs import as_tensor, check_number, float_tensor, floating
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.shape import reshape
from mpitrain.ops.unary import Unary, log1p, sin, unary

__all__ = ["digamma", "entr", "erf", "erfc", "erfcx", "erfinv", "lgamma", "log_ndtr", "logit", "mvlgamma", "nan_to_num",
           "ndtr", "polygamma", "sinc"]

TWO_OVER_ROOT_PI = kernels.TWO_OVER_ROOT_PI


class Special(Unary):
    """A function of each element by a kernel. Its slope is one of tensors alone: arrays have no such functions."""

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return Function.backward(ctx, grad)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            return Unary.derivative(ctx, grad)


def special(name: str, kernel: Callable[[Any], Any], slope: Callable[[Any, Any], Any], doc: str, *,
            keeps_output: bool = False) -> Callable[[Any], Tensor]:
    """An op of this name; see `Special`."""
    return unary(name, lambda xp, x: kernel(x), slope, doc, keeps_output=keeps_output, kind=Special)


erf = special("erf", kernels.erf, lambda m, x: TWO_OVER_ROOT_PI * m.exp(-x * x),
              "The error function, 2 / sqrt(pi) int_0^x exp(-t^2) dt.")
erfc = special("erfc", kernels.erfc, lambda m, x: -TWO_OVER_ROOT_PI * m.exp(-x * x),
               "1 - erf(x), exact also where that is small.")
erfcx = special("erfcx", kernels.erfcx, lambda m, x: 2 * x * m.erfcx(x) - TWO_OVER_ROOT_PI, "exp(x^2) erfc(x).")
erfinv = special("erfinv", kernels.erfinv, lambda m, y: 1 / TWO_OVER_ROOT_PI * m.exp(y * y),
                 "The number whose error function is x, of -1 ... 1.", keeps_output=True)
lgamma = special("lgamma", kernels.lgamma, lambda m, x: m.digamma(x), "log |gamma(x)|.")
digamma = special("digamma", kernels.digamma, lambda m, x: m.polygamma(1, x), "The derivative of `lgamma`.")


class Polygamma(Function):
    @staticmethod
    def forward(ctx: Context, x: Array, *, n: int) -> Array:
        x = floating("polygamma", x)
        ctx.n = n
        ctx.save(x)
        if n < 2:
            return (kernels.trigamma if n else kernels.digamma)(x)
        with np.errstate(all="ignore"):
            return ctx.xp.asarray(kernels.polygamma(n, x)).astype(x.dtype)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad * polygamma(ctx.n + 1, ctx.input(0))


def polygamma(n: int, x: Any) -> Tensor:
    """The n-th derivative of `digamma`."""
    if not isinstance(n, int) or n < 0:
        raise ShapeError(f"polygamma: n is {n!r}, expected an integer of 0 or more")
    return Polygamma.apply(as_tensor(x), n=n)


def mvlgamma(x: Any, p: int) -> Tensor:
    """The logarithm of the multivariate gamma function of dimension p, of x > (p - 1) / 2."""
    x = as_tensor(x)
    if p < 1:
        raise ShapeError(f"mvlgamma: p is {p}, expected 1 or more")
    shifts = Tensor((0.0 - 0.5 * x.xp.arange(p)).astype(x.dtype if is_float(x.dtype) else "float32"))
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
    return _logit(x)


def _log_odds(x: Array) -> Array:
    with np.errstate(all="ignore"):
        return array_module(x).log(x / (1 - x))


_logit = special("logit", _log_odds,
                 lambda m, x: m.where((x.array < 0) | (x.array > 1), math.nan, 1.0 / ((x + 0.0) * (1.0 - x))), "")


class Replace(Function):
    @staticmethod
    def forward(ctx: Context, x: Array, *, nan: float, most: float, least: float) -> Array:
        ctx.save(x)
        return replace(x, nan, most, least)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return where(ctx.xp.isfinite(ctx.saved[0]), grad, grad.dtype.type(0))


def nan_to_num(x: Any, nan: float | None = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """`x` with numbers in place of NaN and infinities: 0, and the largest and the smallest there are."""
    x = as_tensor(x)
    if not is_float(x.dtype):
        return x
    for what, number in (("nan", nan), ("posinf", posinf), ("neginf", neginf)):
        if number is not None:
            check_number("nan_to_num", what, number)
    ends = np.finfo(x.dtype)
    return Replace.apply(x, nan=0.0 if nan is None else float(nan), most=float(ends.max if posinf is None else posinf),
                         least=float(ends.min if neginf is None else neginf))


def entr(x: Any) -> Tensor:
    """-x log(x), 0 at 0, and -inf below, where the gradient is NaN."""
    return _entr(x)


def _entropy(x: Array) -> Array:
    xp = array_module(x)
    with np.errstate(all="ignore"):
        return xp.where(x > 0, -x * xp.log(x), xp.where(x == 0, x.dtype.type(0), xp.where(x < 0, x.dtype.type(-math.inf), x)))


_entr = special("entr", _entropy, lambda m, x: -1.0 - m.log(x), "")


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
