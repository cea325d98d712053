"""Products, deviations, counts and questions over all dims, one, or several."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod as _length
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, is_float
from mpitrain.errors import ShapeError
from mpitrain.kernels import lines as kernels
from mpitrain.ops.choice import where
from mpitrain.ops.comparison import equal
from mpitrain.ops.elementwise import sqrt
from mpitrain.ops.inputs import Dims, as_tensor, dim_of, dims_of, float_tensor
from mpitrain.ops.logic import isnan, plain
from mpitrain.ops.reduce import max as largest
from mpitrain.ops.reduce import mean, var
from mpitrain.ops.reduce import min as smallest
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.results import Places, Range
from mpitrain.ops.scans import cumprod
from mpitrain.ops.scattering import gather
from mpitrain.ops.shape import concatenate, reshape, transpose

__all__ = ["all", "aminmax", "any", "argmax", "argmin", "count_nonzero", "max_with_index", "min_with_index", "nanmean", "nansum",
           "prod", "std", "std_mean", "var_mean"]


class Prod(Function):
    """Over the last dim. The gradient is the product of what comes before and after, so that zeros may be among the factors."""

    @staticmethod
    def forward(ctx: Context, x: Array) -> Array:
        ctx.save(x)
        return kernels.prod(x)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        x = ctx.saved[0]
        if x.dtype != "float32":
            return kernels.prod_gradient(x, grad)
        with np.errstate(over="ignore"):          # As the product itself: those of parts may overflow where the whole does not.
            return kernels.prod_gradient(x.astype("float64"), grad.astype("float64")).astype("float32")

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        x = ctx.input(0)
        if not x.shape[-1]:
            return x * 0
        first = Tensor(ctx.xp.ones((*x.shape[:-1], 1), x.dtype))
        back = (..., slice(None, None, -1))
        before = concatenate([first, cumprod(x, -1)[..., :-1]], -1)
        after = concatenate([first, cumprod(x[back], -1)[..., :-1]], -1)[back]
        return reshape(grad, (*grad.shape, 1)) * before * after


def _merged(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """x with these dims as one, the last."""
    rest = tuple(d for d in range(x.ndim) if d not in dims)
    return reshape(transpose(x, rest + dims), (*(x.shape[d] for d in rest), _length(x.shape[d] for d in dims)))


def _kept(x: Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if d in dims else n for d, n in enumerate(x.shape))


def prod(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The product; of integers and booleans int64."""
    x = as_tensor(x)
    dims = dims_of("prod", x, dim)
    made = Prod.apply(_merged(x, dims))
    return reshape(made, _kept(x, dims)) if keepdim else made


def _over(x: Any, dim: Dims, name: str) -> tuple[Tensor, tuple[int, ...] | None]:
    """x, and its dims as the sums take them."""
    x = as_tensor(x)
    return x, dims_of(name, x, dim)


def std(x: Any, dim: Dims = None, *, keepdim: bool = False, correction: int = 1) -> Tensor:
    """The standard deviation, the root of `var`; its gradient is 0 where it is 0."""
    x, dims = _over(x, dim, "std")
    return _root(var(x, dims, keepdim=keepdim, correction=correction))


def _root(squares: Tensor) -> Tensor:
    """The square root, whose gradient is 0 at 0."""
    none = equal(squares, 0)
    return where(none, squares.dtype.type(0), sqrt(where(none, squares.dtype.type(1), squares)))


def var_mean(x: Any, dim: Dims = None, *, keepdim: bool = False, correction: int = 1) -> tuple[Tensor, Tensor]:
    """The variance and the mean."""
    x, dims = _over(x, dim, "var_mean")
    return var(x, dims, keepdim=keepdim, correction=correction), mean(x, dims, keepdim)


def std_mean(x: Any, dim: Dims = None, *, keepdim: bool = False, correction: int = 1) -> tuple[Tensor, Tensor]:
    """The standard deviation and the mean."""
    return std(x, dim, keepdim=keepdim, correction=correction), mean(x, dims_of("std_mean", as_tensor(x), dim), keepdim)


def nansum(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The sum of what is not NaN."""
    x, dims = _over(x, dim, "nansum")
    return total(where(isnan(x), x.dtype.type(0), x) if is_float(x.dtype) else x, dims, keepdim)


def nanmean(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The mean of what is not NaN; NaN where there is nothing else."""
    x, dims = _over(float_tensor("nanmean", x), dim, "nanmean")
    count = total((~isnan(x).array).astype(x.dtype), dims, keepdim).array
    return nansum(x, dims, keepdim) / Tensor(x.xp.where(count == 0, x.dtype.type(float("nan")), count))


def any(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """True where one element at least is not 0; of each element by itself where `dim` is empty, as in PyTorch."""
    return _any(x, dims=_asked(x, dim, "any"), keepdim=keepdim)


def all(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """True where no element is 0; of each element by itself where `dim` is empty, as in PyTorch."""
    return _all(x, dims=_asked(x, dim, "all"), keepdim=keepdim)


def _asked(x: Any, dim: Dims, name: str) -> tuple[int, ...]:
    return () if isinstance(dim, Sequence) and not len(dim) else dims_of(name, as_tensor(x), dim)


_any = plain("any", lambda xp, x, dims, keepdim: xp.any(x, axis=dims, keepdims=keepdim), "")
_all = plain("all", lambda xp, x, dims, keepdim: xp.all(x, axis=dims, keepdims=keepdim), "")


def count_nonzero(x: Any, dim: Dims = None) -> Tensor:
    """How many elements are not 0 (int64)."""
    x, dims = _over(x, dim, "count_nonzero")
    return Tensor(x.xp.asarray((x.array != 0).sum(axis=dims, dtype="int64")))


def _arg(name: str, x: Any, dim: int | None, keepdim: bool) -> Tensor:
    x = as_tensor(x)
    if dim is not None and x.ndim:
        dim = dim_of(name, x, dim)
    if (x.size if dim is None or not x.ndim else x.shape[dim]) == 0:
        raise ShapeError(f"{name} over no elements: shape {x.shape}, dim {dim}")
    values = x.array if x.dtype.kind != "b" else x.array.astype("uint8")
    found = getattr(x.xp, name)(values, axis=dim if x.ndim else None)
    made = x.xp.asarray(found, dtype="int64")
    return Tensor(made.reshape(_kept(x, tuple(range(x.ndim)) if dim is None else (dim,))) if keepdim and x.ndim else made)


def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the largest value is (int64), the first place at a tie; in all of x, flat, where no dim is given."""
    return _arg("argmax", x, dim, keepdim)


def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the smallest value is (int64), the first place at a tie; in all of x, flat, where no dim is given."""
    return _arg("argmin", x, dim, keepdim)


def _with_index(name: str, x: Any, dim: int, keepdim: bool) -> Places:
    x = as_tensor(x)
    places = _arg(name, x, dim, True)
    values = gather(x, dim_of(name, x, dim), places)
    if not keepdim and x.ndim:
        shape = tuple(n for d, n in enumerate(x.shape) if d != dim_of(name, x, dim))
        return Places(reshape(values, shape), Tensor(places.array.reshape(shape)))
    return Places(values, places)


def max_with_index(x: Any, dim: int, keepdim: bool = False) -> Places:
    """The largest values along `dim`, and where they are, the first place at a tie: what PyTorch's x.max(dim) gives."""
    return _with_index("argmax", x, dim, keepdim)


def min_with_index(x: Any, dim: int, keepdim: bool = False) -> Places:
    """The smallest values along `dim`, and where they are, the first place at a tie: what PyTorch's x.min(dim) gives."""
    return _with_index("argmin", x, dim, keepdim)


def aminmax(x: Any, *, dim: int | None = None, keepdim: bool = False) -> Range:
    """The smallest and the largest value; equal ones share the gradient equally."""
    x, dims = _over(x, dim, "aminmax")
    return Range(smallest(x, dims, keepdim), largest(x, dims, keepdim))
