"""Activation functions, softmax among them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mpitrain.autograd import Context, Function, Tensor, grad_enabled
from mpitrain.backend import Array
from mpitrain.errors import ArgumentError, ShapeError
from mpitrain.kernels import pointwise, rows
from mpitrain.kernels.pointwise import ACTIVATIONS
from mpitrain.ops.choice import where
from mpitrain.ops.elementwise import exp, multiply

__all__ = ["gelu", "leaky_relu", "log_softmax", "relu", "sigmoid", "silu", "softmax", "softplus", "tanh"]


class Pointwise(Function):
    """An activation with a kernel for its values and one for its gradient."""

    half = "own"
    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, *, activation: str) -> Array:
        ctx.activation, ctx.name = ACTIVATIONS[activation], activation
        result, kept = ctx.activation.forward(x, ours=False, training=ctx.needs[0])
        ctx.save(kept)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        kept, = ctx.saved
        activation: pointwise.Activation = ctx.activation
        ctx.release()                             # the gradient may be written over what was kept
        return activation.gradient(kept, grad, None)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return gradient_before(ctx, ctx.name, grad, ctx.saved[0], lambda: ctx.input(0))


class Sigmoidal(Pointwise):
    """Tanh and the logistic function: of integers and booleans, too, which become float32 as in PyTorch."""

    integers, makes_floats = "iub", True


class Relu(Pointwise):
    """max(x, 0); integers stay integers."""

    integers = "iu"

    @staticmethod
    def forward(ctx: Context, x: Array, *, activation: str) -> Array:
        if x.dtype.kind not in "iu":
            return Pointwise.forward(ctx, x, activation=activation)
        return ctx.xp.maximum(x, x.dtype.type(0))


class NormalDistribution(Function):
    """The probability that a normal number is below x."""

    floats = 1

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        ctx.save(x)
        return 0.5 * (1 + pointwise.erf(x * pointwise.SQRT_HALF))

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x = ctx.input(0)
        return grad * exp(x * x * -0.5) * pointwise.INVERSE_SQRT_2PI


def _gelu_slope(x: Tensor) -> Tensor:
    density = exp(x * x * -0.5) * pointwise.INVERSE_SQRT_2PI
    return NormalDistribution.apply(x) + x * density


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    square = x * x
    t = tanh((x + square * x * pointwise.TANH_CUBIC) * pointwise.TANH_SCALE)
    return (t + 1) * 0.5 + x * (1 - t * t) * (square * (3 * pointwise.TANH_CUBIC) + 1) * (0.5 * pointwise.TANH_SCALE)


def _silu_slope(x: Tensor) -> Tensor:
    s = sigmoid(x)
    return s * (x * (1 - s) + 1)


SLOPES = {"gelu": _gelu_slope, "gelu_tanh": _gelu_tanh_slope, "silu": _silu_slope}
"""Of those activations that keep their slope instead of their result."""


def gradient_before(ctx: Context, name: str, grad: Tensor, kept: Array, before: Callable[[], Tensor]) -> Tensor:
    """The gradient of an activation's input `before()`, in the `derivative` of what ends with that activation and kept `kept`."""
    if name in SLOPES:
        return grad * (SLOPES[name](before()) if grad_enabled() else kept.reshape(grad.shape))
    y = ctx.output()
    if name == "relu":
        return where(y.array <= 0, grad.dtype.type(0), grad)
    return ((1 - y * y) if name == "tanh" else (1 - y) * y) * grad


class LeakyRelu(Function):
    floats = 1

    @staticmethod
    def forward(ctx: Context, x: Array, *, slope: float) -> Array:
        ctx.save(x)
        ctx.slope = slope
        return ctx.xp.where(x > 0, x, x * x.dtype.type(slope))

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        x, = ctx.saved
        return ctx.xp.where(x > 0, grad, grad * grad.dtype.type(ctx.slope))

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x, = ctx.saved
        return where(x > 0, grad, grad * grad.dtype.type(ctx.slope))


class Softplus(Function):
    floats = 1

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

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return sigmoid(ctx.input(0)) * grad


def tanh(x: Any) -> Tensor:
    return Sigmoidal.apply(x, activation="tanh")


def sigmoid(x: Any) -> Tensor:
    return Sigmoidal.apply(x, activation="sigmoid")


def relu(x: Any, inplace: bool = False) -> Tensor:
    """max(x, 0); the gradient is 0 where x <= 0, and passes NaN as it passes what is above 0, like PyTorch's."""
    if inplace:
        raise ArgumentError("relu: inplace=True, and no operation changes a tensor; leave it out")
    return Relu.apply(x, activation="relu")


def leaky_relu(x: Any, negative_slope: float = 0.01) -> Tensor:
    return LeakyRelu.apply(x, slope=negative_slope)


def gelu(x: Any, approximate: str = "none") -> Tensor:
    """x times the normal distribution function, exact ("none") or by a tanh ("tanh"); Hendrycks and Gimpel, 2016."""
    if approximate not in ("none", "tanh"):
        raise ShapeError(f'gelu: approximate is "none" or "tanh", not "{approximate}"')
    return Pointwise.apply(x, activation="gelu" if approximate == "none" else "gelu_tanh")


def silu(x: Any, inplace: bool = False) -> Tensor:
    """x sigmoid(x)."""
    if inplace:
        raise ArgumentError("silu: inplace=True, and no operation changes a tensor; leave it out")
    return Pointwise.apply(x, activation="silu")


def softplus(x: Any, beta: float = 1.0, threshold: float = math.inf) -> Tensor:
    """``log(1 + exp(beta x)) / beta`` without overflow, and x where beta x > threshold (20 in PyTorch, which costs digits)."""
    if beta == 1.0 and threshold == math.inf:
        return Softplus.apply(x)
    if beta == 0:
        raise ShapeError("softplus: beta is 0, expected another number; the result is divided by it")
    above = (x.array if isinstance(x, Tensor) else x) * beta > threshold
    return where(above, x, Softplus.apply(multiply(x, beta)) / beta)


class Softmax(Function):
    half = "own"
    floats = 4
    kernel, gradient = rows.softmax, rows.softmax_grad

    @staticmethod
    def forward(ctx: Context, x: Array, *, dim: int) -> Array:
        ctx.dim = dim
        result = _along_last(x, dim, ctx.function.kernel)
        ctx.save(result)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        result, = ctx.saved
        return _along_last(result, ctx.dim, ctx.function.gradient, grad)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        y = ctx.output()
        return y * (grad - (grad * y).sum(ctx.dim, True))


class LogSoftmax(Softmax):
    half = ""
    kernel, gradient = rows.log_softmax, rows.log_softmax_grad

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad - exp(ctx.output()) * grad.sum(ctx.dim, True)


def _along_last(x: Array, dim: int, kernel: Any, *more: Array) -> Array:
    """The kernel on matrices whose rows lie along `dim`."""
    if not -max(x.ndim, 1) <= dim < max(x.ndim, 1):           # a number counts as a row of one, as in PyTorch
        raise ShapeError(f"softmax: dim {dim} of an array with {x.ndim} dims, shape {x.shape}")
    if x.size == 0:
        return x.copy()
    if x.ndim == 0:
        return kernel(*(a.reshape(1, 1) for a in (x, *more))).reshape(())
    arrays = [a.swapaxes(dim, -1) for a in (x, *more)]
    shape = arrays[0].shape
    return kernel(*(a.reshape(-1, shape[-1]) for a in arrays)).reshape(shape).swapaxes(dim, -1)


def softmax(x: Any, dim: int = -1) -> Tensor:
    return Softmax.apply(x, dim=dim)


def log_softmax(x: Any, dim: int = -1) -> Tensor:
    return LogSoftmax.apply(x, dim=dim)
