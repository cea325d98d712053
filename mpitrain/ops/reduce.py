"""Sums, means, extrema and the like, over all dims, one, or several."""

from __future__ import annotations

from math import prod
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels.sums import sum_over
from mpitrain.kernels.variances import squares_over
from mpitrain.ops.elementwise import exp
from mpitrain.ops.inputs import Dims as Given
from mpitrain.ops.inputs import reduced
from mpitrain.ops.shape import broadcast_to

__all__ = ["logsumexp", "max", "mean", "min", "sum", "var"]

Dims = int | tuple[int, ...] | None


class Sum(Function):
    half = "own"
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, *, dim: Dims, keepdim: bool) -> Array:
        ctx.shape, ctx.kept = x.shape, _kept(x, dim)
        if x.dtype.kind in "bu":                  # PyTorch's dtype of sums of integers
            x = x.astype("int64")
        return sum_over(x, dim, keepdim)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return ctx.xp.broadcast_to(grad.reshape(ctx.kept), ctx.shape)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return broadcast_to(grad.reshape(ctx.kept), ctx.shape)


class Mean(Function):
    half = "own"
    complex_inputs = "analytic"
    makes_floats = True

    @staticmethod
    def forward(ctx: Context, x: Array, *, dim: Dims, keepdim: bool) -> Array:
        ctx.shape, ctx.kept = x.shape, _kept(x, dim)
        ctx.count = _count(x, dim)
        if ctx.count == 0:
            raise ShapeError(f"mean over no elements: shape {x.shape}, dim {dim}")
        made = sum_over(x, dim, keepdim)
        made /= ctx.count
        return made

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return ctx.xp.broadcast_to((grad / ctx.count).reshape(ctx.kept), ctx.shape)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return broadcast_to((grad / ctx.count).reshape(ctx.kept), ctx.shape)


class Extremum(Function):
    """The largest or smallest value; equal ones share the gradient equally."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, dim: Dims, keepdim: bool, largest: bool) -> Array:
        if _count(x, dim) == 0:
            raise ShapeError(f"{'max' if largest else 'min'} over no elements: shape {x.shape}, dim {dim}")
        result = x.max(axis=dim, keepdims=True) if largest else x.min(axis=dim, keepdims=True)
        ctx.dim, ctx.kept = dim, result.shape
        if not keepdim:
            result = result.reshape(_dropped(x, dim))
        ctx.save(x, result)                       # the very array that is handed out, so that it is watched
        return result

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x, result = ctx.saved
        result = result.reshape(ctx.kept)
        chosen = ((x == result) | ((x != x) & (result != result))).astype(grad.dtype)      # NaN wins, so it has the gradient
        return (grad.reshape(ctx.kept) / chosen.sum(axis=ctx.dim, keepdims=True)) * chosen


class Variance(Function):
    makes_floats = True

    @staticmethod
    def forward(ctx: Context, x: Array, *, dim: Dims, keepdim: bool, correction: int) -> Array:
        count = _count(x, dim)
        if count <= correction:
            raise ShapeError(f"var with correction={correction} over {count} elements: shape {x.shape}, dim {dim}")
        ctx.dim, ctx.kept, ctx.degrees = dim, _kept(x, dim), count - correction
        dtype = x.dtype.newbyteorder("=")
        mean, squares = squares_over(x, _dims(x, dim))
        ctx.save(x, mean.astype(dtype))
        squares /= ctx.degrees
        return squares.astype(dtype).reshape(ctx.kept if keepdim else _dropped(x, dim))

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        x, mean = ctx.saved
        centred = x - mean
        centred *= grad.reshape(ctx.kept) * (2 / ctx.degrees)
        return centred

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x = ctx.input(0)
        return (x - x.mean(ctx.dim, True)) * (grad.reshape(ctx.kept) * (2 / ctx.degrees))


class LogSumExp(Function):
    makes_floats = True

    @staticmethod
    def forward(ctx: Context, x: Array, *, dim: Dims, keepdim: bool) -> Array:
        xp = ctx.xp
        if _count(x, dim) == 0:
            raise ShapeError(f"logsumexp over no elements: shape {x.shape}, dim {dim}")
        top = x.max(axis=dim, keepdims=True)
        top = xp.where(xp.isfinite(top), top, top.dtype.type(0))        # inf - inf would be NaN
        result = xp.log(sum_over(xp.exp(x - top), dim, True)) + top
        ctx.kept = result.shape
        if not keepdim:
            result = result.reshape(_dropped(x, dim))
        ctx.save(x, result)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        x, result = ctx.saved
        return ctx.xp.exp(x - result.reshape(ctx.kept)) * grad.reshape(ctx.kept)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return exp(ctx.input(0) - ctx.output().reshape(ctx.kept)) * grad.reshape(ctx.kept)


def _dims(x: Array, dim: Dims) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    dims = dim if isinstance(dim, tuple) else (dim,)
    for d in dims:
        if not -x.ndim <= d < x.ndim:
            raise ShapeError(f"dim {d} of an array with {x.ndim} dims, shape {x.shape}")
    found = tuple(d % x.ndim for d in dims)
    if len(set(found)) < len(found):
        raise ShapeError(f"dims {dims} of shape {x.shape} name one dim twice")
    return found


def _kept(x: Array, dim: Dims) -> tuple[int, ...]:
    """The shape of the result with keepdim: what the gradient is reshaped to."""
    dims = _dims(x, dim)
    return tuple(1 if i in dims else n for i, n in enumerate(x.shape))


def _dropped(x: Array, dim: Dims) -> tuple[int, ...]:
    dims = _dims(x, dim)
    return tuple(n for i, n in enumerate(x.shape) if i not in dims)


def _count(x: Array, dim: Dims) -> int:
    return prod(x.shape[d] for d in _dims(x, dim))


def sum(x: Any, dim: Given = None, keepdim: bool = False) -> Tensor:
    return Sum.apply(x, dim=reduced("sum", x, dim), keepdim=keepdim)


def mean(x: Any, dim: Given = None, keepdim: bool = False) -> Tensor:
    return Mean.apply(x, dim=reduced("mean", x, dim), keepdim=keepdim)


def max(x: Any, dim: Given = None, keepdim: bool = False) -> Tensor:
    """The largest values (not where they are); equal ones share the gradient equally."""
    return Extremum.apply(x, dim=reduced("max", x, dim), keepdim=keepdim, largest=True)


def min(x: Any, dim: Given = None, keepdim: bool = False) -> Tensor:
    """The smallest values (not where they are); equal ones share the gradient equally."""
    return Extremum.apply(x, dim=reduced("min", x, dim), keepdim=keepdim, largest=False)


def var(x: Any, dim: Given = None, *, keepdim: bool = False, correction: int = 1) -> Tensor:
    """The variance: squared distances from the mean, summed in float64 and divided by ``count - correction``."""
    return Variance.apply(x, dim=reduced("var", x, dim), keepdim=keepdim, correction=correction)


def logsumexp(x: Any, dim: Given = None, keepdim: bool = False) -> Tensor:
    """``log(sum(exp(x)))`` without overflow."""
    return LogSumExp.apply(x, dim=reduced("logsumexp", x, dim), keepdim=keepdim)
