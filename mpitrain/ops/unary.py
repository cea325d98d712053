"""Functions of one number, element by element: trigonometric, hyperbolic, exponential, rounding.

Each stands in one line: its value, and its slope as an expression that arrays and tensors both take, so that derivatives have
derivatives. Integers and booleans become float32, as in PyTorch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.choice import signs
from mpitrain.ops.inputs import as_tensor, floating

__all__ = ["acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "deg2rad", "exp2", "expm1", "floor", "frac",
           "log10", "log1p", "log2", "positive", "rad2deg", "reciprocal", "round", "rsqrt", "sgn", "sign", "sin", "sinh",
           "square", "tan", "trunc"]


class Unary(Function):
    """A function of each element: `value(xp, x)`, and `slope(module, kept)`, where the input or the output is kept."""

    value: Callable[[Any, Any], Any]
    slope: Callable[[Any, Any], Any]
    keeps_output = False

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        result = ctx.function.value(ctx.xp, floating(ctx.function.__name__.lower(), x))
        ctx.save(result if ctx.function.keeps_output else x)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return grad * ctx.function.slope(ctx.xp, ctx.saved[0])

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        kept = ctx.output(0) if ctx.function.keeps_output else ctx.input(0)
        return grad * ctx.function.slope(sys.modules[__package__], kept)


def unary(name: str, value: Callable[[Any, Any], Any], slope: Callable[[Any, Any], Any], doc: str, *,
          keeps_output: bool = False, kind: type[Unary] = Unary) -> Callable[[Any], Tensor]:
    """An op of this name; see `Unary`."""
    function: Any = type(name.capitalize(), (kind,), {"value": staticmethod(value), "slope": staticmethod(slope),
                                                      "keeps_output": keeps_output, "__doc__": doc})

    def op(x: Any) -> Tensor:
        return function.apply(as_tensor(x))
    op.__name__ = op.__qualname__ = name
    op.__doc__ = doc
    return op


sin = unary("sin", lambda xp, x: xp.sin(x), lambda m, x: m.cos(x), "The sine of x, in radians.")
cos = unary("cos", lambda xp, x: xp.cos(x), lambda m, x: -m.sin(x), "The cosine of x, in radians.")
tan = unary("tan", lambda xp, x: xp.tan(x), lambda m, y: y * y + 1, "The tangent of x, in radians.", keeps_output=True)
asin = unary("asin", lambda xp, x: xp.arcsin(x), lambda m, x: 1 / m.sqrt(1 - x * x), "The angle, in radians, whose sine is x.")
acos = unary("acos", lambda xp, x: xp.arccos(x), lambda m, x: -1 / m.sqrt(1 - x * x), "The angle, in radians, whose cosine is x.")
atan = unary("atan", lambda xp, x: xp.arctan(x), lambda m, x: 1 / (x * x + 1), "The angle, in radians, whose tangent is x.")
sinh = unary("sinh", lambda xp, x: xp.sinh(x), lambda m, x: m.cosh(x), "The hyperbolic sine.")
cosh = unary("cosh", lambda xp, x: xp.cosh(x), lambda m, x: m.sinh(x), "The hyperbolic cosine.")
asinh = unary("asinh", lambda xp, x: xp.arcsinh(x), lambda m, x: 1 / m.sqrt(x * x + 1), "The number whose hyperbolic sine is x.")
acosh = unary("acosh", lambda xp, x: xp.arccosh(x), lambda m, x: 1 / m.sqrt(x * x - 1),
              "The number of 0 or more whose hyperbolic cosine is x.")
atanh = unary("atanh", lambda xp, x: xp.arctanh(x), lambda m, x: 1 / (1 - x * x), "The number whose hyperbolic tangent is x.")
exp2 = unary("exp2", lambda xp, x: xp.exp2(x), lambda m, y: y * math.log(2), "2 to the power x.", keeps_output=True)
expm1 = unary("expm1", lambda xp, x: xp.expm1(x), lambda m, y: y + 1, "exp(x) - 1, exact also for small x.", keeps_output=True)
log1p = unary("log1p", lambda xp, x: xp.log1p(x), lambda m, x: 1 / (x + 1), "log(1 + x), exact also for small x.")
log2 = unary("log2", lambda xp, x: xp.log2(x), lambda m, x: 1 / (x * math.log(2)), "The logarithm to base 2.")
log10 = unary("log10", lambda xp, x: xp.log10(x), lambda m, x: 1 / (x * math.log(10)), "The logarithm to base 10.")
rsqrt = unary("rsqrt", lambda xp, x: 1 / xp.sqrt(x), lambda m, y: -0.5 * (y * y * y), "1 / sqrt(x).", keeps_output=True)
reciprocal = unary("reciprocal", lambda xp, x: 1 / x, lambda m, y: -(y * y), "1 / x.", keeps_output=True)
deg2rad = unary("deg2rad", lambda xp, x: x * (math.pi / 180), lambda m, x: math.pi / 180, "Degrees in radians.")
rad2deg = unary("rad2deg", lambda xp, x: x * (180 / math.pi), lambda m, x: 180 / math.pi, "Radians in degrees.")


class Square(Function):
    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        ctx.save(x)
        return x * x

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return grad * (2 * ctx.saved[0])

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad * (2 * ctx.input(0))


class Step(Function):
    """A function that is constant between its jumps, `name` of the array module: its gradient is 0. Integers stay as they are."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, name: str) -> Array:
        if x.dtype.kind == "b":
            raise ShapeError(f"{name}: the input is boolean, expected numbers")
        return x.copy() if x.dtype.kind in "iu" else getattr(ctx.xp, name)(x)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return ctx.xp.zeros_like(grad)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Tensor(ctx.xp.zeros_like(grad.array))


class Sign(Step):
    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:  # type: ignore[override]
        if x.dtype.kind == "b":
            raise ShapeError("sign: the input is boolean, expected numbers")
        return signs(x)


class Round(Step):
    @staticmethod
    def forward(ctx: Context, x: Array, *, decimals: int) -> Array:  # type: ignore[override]
        if x.dtype.kind == "f" and decimals:
            scale = x.dtype.type(10.0 ** abs(decimals))
            return ctx.xp.rint(x * scale) / scale if decimals > 0 else ctx.xp.rint(x / scale) * scale
        return ctx.xp.rint(x) if x.dtype.kind == "f" else x.copy()


class Frac(Function):
    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        x = floating("frac", x)
        return x - ctx.xp.trunc(x)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return grad

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad


def square(x: Any) -> Tensor:
    """x * x."""
    return Square.apply(as_tensor(x))


def floor(x: Any) -> Tensor:
    """The largest integer that is not above x; the gradient is 0."""
    return Step.apply(as_tensor(x), name="floor")


def ceil(x: Any) -> Tensor:
    """The smallest integer that is not below x; the gradient is 0."""
    return Step.apply(as_tensor(x), name="ceil")


def trunc(x: Any) -> Tensor:
    """x without what comes after the decimal point; the gradient is 0."""
    return Step.apply(as_tensor(x), name="trunc")


def sign(x: Any) -> Tensor:
    """-1, 0 or 1; 0 of NaN, as in PyTorch. The gradient is 0."""
    return Sign.apply(as_tensor(x))


sgn = sign


def round(x: Any, decimals: int = 0) -> Tensor:
    """The nearest integer, the even one at a tie, or so many `decimals`; the gradient is 0."""
    return Round.apply(as_tensor(x), decimals=decimals)


def frac(x: Any) -> Tensor:
    """What comes after the decimal point, with the sign of x; the gradient is 1."""
    return Frac.apply(as_tensor(x))


def positive(x: Any) -> Tensor:
    """x itself."""
    return as_tensor(x)
