"""Activations made of pieces: linear or exponential below a bound, linear or constant above. At a bound itself, values and
derivatives are PyTorch's."""

from __future__ import annotations

from math import prod
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.backend.random import current
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.kernels.random import random_words
from mpitrain.ops.choice import minimum, where
from mpitrain.ops.elementwise import exp
from mpitrain.ops.inputs import check_number, fitting, only_floats
from mpitrain.ops.shape import reshape

__all__ = ["celu", "elu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "prelu", "relu6", "rrelu", "selu", "softshrink",
           "threshold"]

SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


class Elu(Function):
    """scale x above 0, scale alpha (exp(x / width) - 1) below."""

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, *, alpha: float, width: float, scale: float) -> Array:
        xp = ctx.xp
        ctx.save(x)
        ctx.alpha, ctx.width, ctx.scale = alpha, width, scale
        return xp.where(x > 0, x * scale, xp.expm1(xp.minimum(x, 0) / width) * (alpha * scale))

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x = ctx.input(0)
        below = exp(minimum(x, 0.0) / ctx.width) * (ctx.alpha * ctx.scale / ctx.width)
        return grad * where(x.array <= 0, below, ctx.scale)


class Hardtanh(Function):
    """x between two bounds; integers stay integers."""

    floats = 4
    integers = "iu"

    @staticmethod
    def forward(ctx: Context, x: Array, *, low: float, high: float) -> Array:
        ctx.save(x)
        ctx.low, ctx.high = low, high
        if x.dtype.kind != "f":
            low, high = fitting("hardtanh", low, x.dtype), fitting("hardtanh", high, x.dtype)
        return ctx.xp.clip(x, low, high)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x, = ctx.saved
        return where((x <= ctx.low) | (x >= ctx.high), 0.0, grad)


class Hardsigmoid(Function):
    """A line of slope 1/6 between -3 and 3, 0 and 1 outside."""

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        ctx.save(x)
        return ctx.xp.clip(x + 3, 0, 6) / 6

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x, = ctx.saved
        return where((x > -3) & (x < 3), grad / 6.0, 0.0)


class Hardswish(Function):
    """x times the hard sigmoid of x."""

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        ctx.save(x)
        return x * ctx.xp.clip(x + 3, 0, 6) / 6

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x = ctx.input(0)
        return where(x.array <= -3, 0.0, grad * where(x.array < 3, x / 3.0 + 0.5, 1.0))


class Shrink(Function):
    """0 within `width` of 0; outside x, nearer to 0 by `by`."""

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, *, width: float, by: float) -> Array:
        xp = ctx.xp
        ctx.save(x)
        ctx.width = width
        inside = (x >= -width) & (x <= width)
        return xp.where(inside, x.dtype.type(0), x - xp.sign(x) * by if by else x)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x, = ctx.saved
        return where((x >= -ctx.width) & (x <= ctx.width), 0.0, grad)


class Threshold(Function):
    """x above a bound, one value up to it; integers stay integers."""

    floats = 4
    integers = "iu"

    @staticmethod
    def forward(ctx: Context, x: Array, *, bound: float, value: float) -> Array:
        ctx.save(x)
        ctx.bound = bound
        if x.dtype.kind != "f":
            bound, value = fitting("threshold", bound, x.dtype), fitting("threshold", value, x.dtype)
        return ctx.xp.where(x <= bound, x.dtype.type(value), x)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x, = ctx.saved
        return where(x <= ctx.bound, 0.0, grad)


def elu(x: Any, alpha: float = 1.0) -> Tensor:
    """x above 0, alpha (exp(x) - 1) below; Clevert et al., 2015."""
    return Elu.apply(x, alpha=alpha, width=1.0, scale=1.0)


def selu(x: Any) -> Tensor:
    """The ELU with the scale and alpha that keep mean 0 and variance 1; Klambauer et al., 2017."""
    return Elu.apply(x, alpha=SELU_ALPHA, width=1.0, scale=SELU_SCALE)


def celu(x: Any, alpha: float = 1.0) -> Tensor:
    """x above 0, alpha (exp(x / alpha) - 1) below; Barron, 2017. ConfigError where alpha is 0."""
    if alpha == 0:
        raise ConfigError("celu: alpha is 0, expected another number; it divides x")
    return Elu.apply(x, alpha=alpha, width=alpha, scale=1.0)


def hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    """x limited to [min_val, max_val]; the gradient passes inside, not at the bounds as that of `clip` does."""
    check_number("hardtanh", "min_val", min_val)
    check_number("hardtanh", "max_val", max_val)
    if not min_val <= max_val:
        raise ConfigError(f"hardtanh: min_val is {min_val} and max_val {max_val}, expected min_val <= max_val; swap them")
    return Hardtanh.apply(x, low=min_val, high=max_val)


def relu6(x: Any) -> Tensor:
    """x limited to [0, 6]."""
    return Hardtanh.apply(x, low=0.0, high=6.0)


def hardsigmoid(x: Any) -> Tensor:
    """min(max(x + 3, 0), 6) / 6."""
    return Hardsigmoid.apply(x)


def hardswish(x: Any) -> Tensor:
    """x hardsigmoid(x); Howard et al.: "Searching for MobileNetV3", 2019."""
    return Hardswish.apply(x)


def hardshrink(x: Any, lambd: float = 0.5) -> Tensor:
    """0 where |x| <= lambd, else x."""
    return Shrink.apply(x, width=lambd, by=0.0)


def softshrink(x: Any, lambd: float = 0.5) -> Tensor:
    """0 where |x| <= lambd, else x nearer to 0 by lambd. ConfigError where lambd is negative."""
    if not lambd >= 0:
        raise ConfigError(f"softshrink: lambd is {lambd}, expected at least 0")
    return Shrink.apply(x, width=lambd, by=lambd)


def threshold(x: Any, threshold: float, value: float) -> Tensor:
    """x where x > threshold, else value."""
    return Threshold.apply(x, bound=threshold, value=value)


def prelu(x: Any, weight: Any) -> Tensor:
    """x, or weight x where x <= 0; weight is one number (1,), or one a channel (C,) of x (N, C, ...). He et al., 2015.

    ShapeError where weight is neither.
    """
    array = only_floats("prelu", x)
    shape, count = tuple(x.shape), prod(weight.shape)
    if len(weight.shape) > 1 or count != 1 and (len(shape) < 2 or shape[1] != count):
        raise ShapeError(f"prelu: the weight has shape {tuple(weight.shape)}, the input {shape}; expected one weight, or one for "
                         "each channel in dim 1")
    slope = reshape(weight, () if not shape else (count, *(1 for _ in shape[2:])) if count > 1 else (1,) * len(shape))
    return where(array > 0, x, slope * x)


def rrelu(x: Any, layer: str, lower: float = 1 / 8, upper: float = 1 / 3) -> Tensor:
    """x, or s x where x <= 0, with s uniform in [lower, upper), one for each element of x (B, ...); Xu et al., 2015.

    The numbers are drawn from the current random scope under the name `layer`, as those of `ops.dropout` are. In eval, use
    `leaky_relu` with the mean of lower and upper.
    """
    check_number("rrelu", "lower", lower)
    check_number("rrelu", "upper", upper)
    if not lower <= upper:
        raise ConfigError(f"rrelu: lower is {lower} and upper {upper}, expected lower <= upper; swap them")
    if not len(x.shape):
        raise ShapeError("rrelu: the input has no dims, expected (B, ...)")
    array = only_floats("rrelu", x)
    xp = x.xp if isinstance(x, Tensor) else Tensor(x).xp
    rows = current().rows(len(array), xp)
    words = random_words(rows, current().key(layer), array.size // max(len(array), 1))
    slope = (lower + (upper - lower) * (words.astype("float64") / 2.0 ** 32)).astype(array.dtype).reshape(array.shape)
    return where(array > 0, x, x * slope)
