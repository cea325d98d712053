# mypy: disable-error-code="no-any-return"
# (Function.apply gives one tensor, or a tuple of them.)
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

    @staticmethod
    def forward(ctx: Context, x: Array, *, dim: int) -> Array:
        result = _along_last(x, dim, rows.softmax)
        ctx.dim = dim
        ctx.save(result)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        result, = ctx.saved
        return _along_last(result, ctx.dim, rows.softmax_grad, grad)


class LogSoftmax(Function):
    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, *, dim: int) -> Array:
        result = _along_last(x, dim, rows.log_softmax)
        ctx.dim = dim
        ctx.save(result)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        result, = ctx.saved
        return _along_last(result, ctx.dim, rows.log_softmax_grad, grad)


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
