"""Activation functions, softmax among them."""

from __future__ import annotations

import math
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels import pointwise, rows
from mpitrain.kernels.pointwise import ACTIVATIONS
from mpitrain.ops.elementwise import multiply, where

__all__ = ["gelu", "leaky_relu", "log_softmax", "relu", "sigmoid", "silu", "softmax", "softplus", "tanh"]


class Pointwise(Function):
    """An activation with a kernel for its values and one for its gradient."""

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, *, activation: str) -> Array:
        ctx.activation = ACTIVATIONS[activation]
        result, kept = ctx.activation.forward(x, ours=False, training=ctx.needs[0])
        ctx.save(kept)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        kept, = ctx.saved
        activation: pointwise.Activation = ctx.activation
        ctx.release()                             # the gradient may be written over what was kept
        return activation.gradient(kept, grad, None)


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
    return Pointwise.apply(x, activation="tanh")


def sigmoid(x: Any) -> Tensor:
    return Pointwise.apply(x, activation="sigmoid")


def relu(x: Any) -> Tensor:
    """max(x, 0); the gradient is 0 where x <= 0, and passes NaN as it passes what is above 0, like PyTorch's."""
    return Pointwise.apply(x, activation="relu")


def leaky_relu(x: Any, slope: float = 0.01) -> Tensor:
    return LeakyRelu.apply(x, slope=slope)


def gelu(x: Any, approximate: str = "none") -> Tensor:
    """x times the normal distribution function, exact ("none") or by a tanh ("tanh"); Hendrycks and Gimpel, 2016."""
    if approximate not in ("none", "tanh"):
        raise ShapeError(f'gelu: approximate is "none" or "tanh", not "{approximate}"')
    return Pointwise.apply(x, activation="gelu" if approximate == "none" else "gelu_tanh")


def silu(x: Any) -> Tensor:
    """x sigmoid(x)."""
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


class LogSoftmax(Softmax):
    kernel, gradient = rows.log_softmax, rows.log_softmax_grad


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
