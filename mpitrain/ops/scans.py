"""Running sums, products and extrema along one dim, and differences and integrals of samples."""

from __future__ import annotations

import sys
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, is_float
from mpitrain.backend.ufuncs import accumulated
from mpitrain.errors import ShapeError
from mpitrain.kernels import lines as kernels
from mpitrain.ops.comparison import not_equal
from mpitrain.ops.elementwise import add, subtract
from mpitrain.ops.inputs import as_tensor, dim_of, float_tensor, raw
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.results import Places
from mpitrain.ops.scattering import gather, places_of
from mpitrain.ops.shape import concatenate, reshape, stack, swapaxes

__all__ = ["cummax", "cummin", "cumprod", "cumsum", "cumulative_trapezoid", "diff", "logcumsumexp", "trapezoid"]


class CumSum(Function):
    """Sums of float32 run in float64, as PyTorch's: rounding would grow with the length."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, dim: int, back: bool = False) -> Array:
        ctx.dim, ctx.back = dim, back
        return kernels.cumsum(x, dim, back)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return CumSum.apply(grad, dim=ctx.dim, back=not ctx.back)


class CumProd(Function):
    """Along the last dim. The gradient divides by nothing, so that zeros may be among the factors."""

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        ctx.save(x)
        return kernels.cumprod(x, x.ndim - 1)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return kernels.cumprod_gradient(ctx.saved[0], grad)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return _product_slope(ctx.input(0), grad)


class LogCumSumExp(Function):
    """Along the last dim."""

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        result = accumulated("logaddexp", x, -1)
        ctx.save(x, result)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        x, y = ctx.saved
        return _logarithm_slope(ctx.xp, x, y, grad)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return _logarithm_slope(sys.modules[__package__], ctx.input(0), ctx.output(0), grad)


def _product_slope(x: Tensor, grad: Tensor) -> Tensor:
    """g_k = p_k s_k: p_k is the product of what comes before k, s_k = grad_k + x_{k+1} s_{k+1}."""
    if not x.shape[-1]:
        return grad
    before: list[Any] = [None]
    tail, slopes = grad[..., -1], []
    for k in range(x.shape[-1] - 1):
        before.append(x[..., k] if before[-1] is None else before[-1] * x[..., k])
    for k in range(x.shape[-1] - 1, -1, -1):
        slopes.append(tail if before[k] is None else before[k] * tail)
        if k:
            tail = grad[..., k - 1] + x[..., k] * tail
    return stack(slopes[::-1], -1)


def _logarithm_slope(m: Any, x: Any, y: Any, grad: Any) -> Any:
    """g_k = exp(x_k - y_k) s_k, where s_k = grad_k + exp(y_k - y_{k+1}) s_{k+1}: y only grows, so nothing overflows."""
    if not x.shape[-1]:
        return grad
    tail, slopes = grad[..., -1], []
    for k in range(x.shape[-1] - 1, -1, -1):
        slopes.append(m.exp(x[..., k] - y[..., k]) * tail)
        if k:
            tail = grad[..., k - 1] + m.exp(y[..., k - 1] - y[..., k]) * tail
    return m.stack(slopes[::-1], -1)


def _along_last(function: type[Function], name: str, x: Tensor, dim: Any) -> Tensor:
    dim = dim_of(name, x, dim)
    if not x.ndim:
        return reshape(function.apply(reshape(x, 1)), ())
    return swapaxes(function.apply(swapaxes(x, dim, -1)), dim, -1)


def cumsum(x: Any, dim: int) -> Tensor:
    """Running sums along `dim`; of integers and booleans int64."""
    x = as_tensor(x)
    dim = dim_of("cumsum", x, dim)
    return CumSum.apply(x, dim=dim) if x.ndim else add(x, 0)


def cumprod(x: Any, dim: int) -> Tensor:
    """Running products along `dim`; of integers and booleans int64."""
    return _along_last(CumProd, "cumprod", as_tensor(x), dim)


def logcumsumexp(x: Any, dim: int) -> Tensor:
    """Logarithms of running sums of exp(x) along `dim`, without overflow."""
    x = as_tensor(x)
    if not is_float(x.dtype):
        raise ShapeError(f"logcumsumexp: the input is {x.dtype}, expected float32 or float64")
    return _along_last(LogCumSumExp, "logcumsumexp", x, dim)


def cummax(x: Any, dim: int) -> Places:
    """The largest value so far along `dim`, and where it is (int64), the last place at a tie."""
    return _extremum("cummax", as_tensor(x), dim, False)


def cummin(x: Any, dim: int) -> Places:
    """The smallest value so far along `dim`, and where it is (int64), the last place at a tie."""
    return _extremum("cummin", as_tensor(x), dim, True)


def _extremum(name: str, x: Tensor, dim: Any, smallest: bool) -> Places:
    dim = dim_of(name, x, dim)
    if not x.ndim:
        return Places(add(x, 0), Tensor(x.xp.zeros((), "int64")))
    places = places_of(kernels.cumextremum, (x.array,), dim, smallest)
    return Places(gather(x, dim, places), Tensor(places))


def diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Differences of neighbours along `dim`, n times, after `prepend` and `append` were put at the ends."""
    x = as_tensor(x)
    if not x.ndim or n < 0:
        raise ShapeError(f"diff: shape {x.shape}, n {n}; expected at least one dim and 0 or more times")
    dim = dim_of("diff", x, dim)
    if n == 0:
        return x
    ends = [as_tensor(part) for part in (prepend, x, append) if part is not None]
    x = concatenate(ends, dim) if len(ends) > 1 else x
    for _ in range(min(n, x.shape[dim])):
        before = (slice(None),) * dim
        op = not_equal if x.dtype.kind == "b" else subtract
        x = op(x[(*before, slice(1, None))], x[(*before, slice(None, -1))])
    return x


def _trapezoids(name: str, y: Any, x: Any, dx: Any, dim: int) -> tuple[Tensor, int]:
    """The area of each trapezoid, and the dim they lie along."""
    y = as_tensor(y)
    if not y.ndim:
        raise ShapeError(f"{name}: the samples have no dims, expected one at least")
    y = float_tensor(name, y)
    dim = dim_of(name, y, dim)
    if x is not None:
        x = as_tensor(x)
        if x.ndim == 1:
            if x.shape[0] != y.shape[dim]:
                raise ShapeError(f"{name}: {x.shape[0]} places for {y.shape[dim]} samples along dim {dim}; expected as many")
            x = reshape(x, (-1,) + (1,) * (y.ndim - 1 - dim))
            dx = diff(x, dim=0)
        else:
            dx = diff(x, dim=dim - y.ndim)
    before = (slice(None),) * dim
    return (y[(*before, slice(1, None))] + y[(*before, slice(None, -1))]) * dx * 0.5, dim - y.ndim


def trapezoid(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Tensor:
    """The integral along `dim` of samples `y` at `x`, or `dx` apart, by the trapezoidal rule."""
    parts, dim = _trapezoids("trapezoid", y, x, raw(dx), dim)
    return total(parts, dim)


def cumulative_trapezoid(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Tensor:
    """The integral up to each sample but the first; see `trapezoid`."""
    parts, dim = _trapezoids("cumulative_trapezoid", y, x, raw(dx), dim)
    return cumsum(parts, dim)


