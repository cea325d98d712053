# mypy: disable-error-code="no-any-return"
# (Function.apply gives one tensor, or a tuple of them.)
"""Activation functions."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels import pointwise


class Tanh(Function):
    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        result = ctx.xp.tanh(x)
        ctx.save(result)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        result, = ctx.saved
        slope = ctx.xp.empty_like(result)
        ctx.xp.multiply(result, result, out=slope)
        ctx.xp.subtract(1, slope, out=slope)
        slope *= grad
        return slope


class Sigmoid(Function):
    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        result = pointwise.sigmoid(x)
        ctx.save(result)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        result, = ctx.saved
        slope = 1 - result
        slope *= result
        slope *= grad
        return slope


class Relu(Function):
    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        result = pointwise.relu(x)
        ctx.save(result)                          # not x, which nobody else may need any more
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        result, = ctx.saved
        return pointwise.relu_grad(result, grad)


class LeakyRelu(Function):
    @staticmethod
    def forward(ctx: Context, x: Array, *, slope: float) -> Array:
        ctx.save(x)
        ctx.slope = slope
        return ctx.xp.where(x > 0, x, x * x.dtype.type(slope))

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        x, = ctx.saved
        return ctx.xp.where(x > 0, grad, grad * grad.dtype.type(ctx.slope))


class Pointwise(Function):
    """An activation with a kernel for its values and one for its gradient, both functions of x."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, pair: pointwise.Pair) -> Array:
        ctx.save(x)
        ctx.pair = pair
        return pair.values(x)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        x, = ctx.saved
        return ctx.pair.gradient(x, grad)


class Softplus(Function):
    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        xp = ctx.xp
        ctx.save(x)
        result = xp.empty_like(x)
        xp.abs(x, out=result)
        xp.negative(result, out=result)
        xp.exp(result, out=result)
        xp.log1p(result, out=result)
        result += xp.maximum(x, x.dtype.type(0))
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        x, = ctx.saved
        slope = pointwise.sigmoid(x)
        slope *= grad
        return slope


def tanh(x: Any) -> Tensor:
    return Tanh.apply(x)


def sigmoid(x: Any) -> Tensor:
    return Sigmoid.apply(x)


def relu(x: Any) -> Tensor:
    return Relu.apply(x)


def leaky_relu(x: Any, slope: float = 0.01) -> Tensor:
    return LeakyRelu.apply(x, slope=slope)


def gelu(x: Any, approximate: str = "none") -> Tensor:
    """x times the normal distribution function, exact ("none") or by a tanh ("tanh"); Hendrycks and Gimpel, 2016."""
    if approximate not in ("none", "tanh"):
        raise ShapeError(f'gelu: approximate is "none" or "tanh", not "{approximate}"')
    return Pointwise.apply(x, pair=pointwise.GELU if approximate == "none" else pointwise.GELU_TANH)


def silu(x: Any) -> Tensor:
    """x sigmoid(x)."""
    return Pointwise.apply(x, pair=pointwise.SILU)


def softplus(x: Any) -> Tensor:
    """``log(1 + exp(x))`` without overflow."""
    return Softplus.apply(x)
