"""Softmax and its logarithm."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels import rows

__all__ = ["log_softmax", "softmax"]


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
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError(f"softmax: dim {dim} of an array with {x.ndim} dims, shape {x.shape}")
    if x.size == 0:
        return x.copy()
    arrays = [a.swapaxes(dim, -1) for a in (x, *more)]
    shape = arrays[0].shape
    return kernel(*(a.reshape(-1, shape[-1]) for a in arrays)).reshape(shape).swapaxes(dim, -1)


def softmax(x: Any, dim: int = -1) -> Tensor:
    return Softmax.apply(x, dim=dim)


def log_softmax(x: Any, dim: int = -1) -> Tensor:
    return LogSoftmax.apply(x, dim=dim)
