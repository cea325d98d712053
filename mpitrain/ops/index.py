"""Choosing parts of an array: slices are views, arrays of indices copy, and their gradients are added up."""

from __future__ import annotations

from math import prod
from types import EllipsisType, NoneType
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, constant, is_array, is_float
from mpitrain.errors import DataError, ShapeError
from mpitrain.kernels.rows import scatter_add_rows, take_rows
from mpitrain.ops.inputs import as_tensor, raw

__all__ = ["embedding", "getitem", "take"]


class Slice(Function):
    """x[index] for numbers, slices, None and Ellipsis."""

    half = "own"
    complex_inputs = "analytic"
    views = True

    @staticmethod
    def forward(ctx: Context, x: Array, *, index: Any) -> Array:
        ctx.shape, ctx.index = x.shape, index
        return x[index]

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        whole = ctx.xp.zeros(ctx.shape, dtype=grad.dtype)
        whole[ctx.index] = grad
        return whole

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return AddAt.apply(grad, shape=ctx.shape, index=ctx.index)


class Part(Slice):
    """x[slices], copied: an array of its own, as others have that were never a part of something."""

    views = False

    @staticmethod
    def forward(ctx: Context, x: Array, *, index: Any) -> Array:
        return ctx.xp.ascontiguousarray(Slice.forward(ctx, x, index=index))


class Gather(Function):
    """x[index] with arrays of integers or booleans, `chosen`, at those places of the index that are "array"."""

    half = "own"
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, *chosen: Array, index: tuple[Any, ...]) -> Array:
        rest = iter(chosen)
        ctx.shape, ctx.index = x.shape, tuple([next(rest) if isinstance(entry, str) else entry for entry in index])
        return x[ctx.index]

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        whole = ctx.xp.zeros(ctx.shape, dtype=grad.dtype)
        _add_at(ctx.xp, whole, ctx.index, grad)
        return whole, *(None for _ in ctx.needs[1:])

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return AddAt.apply(grad, shape=ctx.shape, index=ctx.index), *(None for _ in ctx.needs[1:])


class AddAt(Function):
    """Zeros of a shape, to which x is added at an index: the adjoint of x[index]."""

    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, *, shape: tuple[int, ...], index: tuple[Any, ...]) -> Array:
        whole = ctx.xp.zeros(shape, dtype=x.dtype)
        _add_at(ctx.xp, whole, index, x)
        ctx.index = index
        return whole

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return getitem(grad, ctx.index)


class Take(Function):
    """Rows of x along one dim."""

    half = "own"
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, indices: Array, *, dim: int) -> Array:
        if not -x.ndim <= dim < x.ndim:
            raise ShapeError(f"take: dim {dim} of an array with {x.ndim} dims, shape {x.shape}")
        ctx.dim, ctx.shape = dim % x.ndim, x.shape
        waits = ctx.xp is np or not is_float(x.dtype)           # a device makes NaN of what is not there
        if waits:
            check_indices("take", indices, x.shape[dim])
        ctx.save(indices)
        if ctx.dim == 0:
            return take_rows(x, indices)
        return ctx.xp.take(x, indices, axis=dim) if waits else _taken(ctx.xp, x, indices, ctx.dim)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        indices, = ctx.saved
        dim, shape = ctx.dim, ctx.shape
        rest = shape[:dim] + shape[dim + 1:]
        chosen = range(dim, dim + indices.ndim)
        order = (*chosen, *range(dim), *range(dim + indices.ndim, grad.ndim))
        summed = _add_rows(ctx.xp, shape[dim], indices, grad.transpose(order).reshape(indices.shape + rest))
        return ctx.xp.moveaxis(summed, 0, dim), None

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return AddAt.apply(grad, shape=ctx.shape, index=(slice(None),) * ctx.dim + (ctx.saved[0],)), None


class Embedding(Function):
    """Rows of a table; rows asked for several times get the sum of their gradients."""

    half = "own"

    @staticmethod
    def forward(ctx: Context, indices: Array, weight: Array) -> Array:
        if weight.ndim != 2 or indices.dtype.kind not in "iu":
            advice = "; x.long() makes indices of floats" if indices.dtype.kind == "f" and weight.ndim == 2 else ""
            raise ShapeError(f"embedding: wants integer indices and a weight with 2 dims, found {indices.dtype} "
                             f"and shape {weight.shape}{advice}")
        if ctx.xp is np or not is_float(weight.dtype):     # a device makes NaN of such a row: it would have to be waited for
            check_indices("embedding", indices, weight.shape[0])
        ctx.save(indices)
        ctx.rows = weight.shape[0]
        return take_rows(weight, indices)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        indices, = ctx.saved
        so_far = None if ctx.xp is np or grad.dtype.kind == "c" else ctx.so_far(1)
        if so_far is not None:                         # of a table that is the head's matrix, too: nothing is zeroed and added
            return None, scatter_add_rows(so_far, indices.reshape(-1), grad.reshape(indices.size, grad.shape[-1]))
        dtype = grad.dtype if grad.dtype.itemsize > 2 else "float32"           # the gradient of a parameter, of 16 bits too
        return None, _add_rows(ctx.xp, ctx.rows, indices, grad, ctx.out(1), dtype)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return None, AddAt.apply(grad, shape=(ctx.rows, grad.shape[-1]), index=(ctx.saved[0],))


def _add_rows(xp: Any, n: int, indices: Array, values: Array, out: Array | None = None, dtype: Any = None) -> Array:
    """(n, ...): row i is the sum of the rows of `values` whose index is i; written to `out` where given."""
    rest = values.shape[indices.ndim:]
    if out is None:
        out = xp.zeros((n, *rest), dtype=values.dtype if dtype is None else dtype)
    else:
        out[...] = 0
    rows, added = out.reshape(n, prod(rest)), values.reshape(indices.size, prod(rest))
    if values.dtype.kind == "c":                  # pairs of numbers
        rows, added = rows.view(values.real.dtype), xp.ascontiguousarray(added).view(values.real.dtype)
    scatter_add_rows(rows, indices.reshape(-1), added)
    return out


def _add_at(xp: Any, whole: Array, index: tuple[Any, ...], values: Array) -> None:
    """whole[index] += values, each as often as it is in the index, in a fixed order: `add.at` of CuPy adds as it happens."""
    if xp is np or values.dtype.kind == "c" or not values.size:
        xp.add.at(whole, index, values)
        return
    dims = 0                                      # the first ones, which are chosen from; rows of the rest are added whole
    while dims < len(index) and is_array(index[dims]) and index[dims].dtype.kind in "iu":
        dims += 1
    dims = dims if dims == len(index) else whole.ndim
    count = prod(whole.shape[:dims])
    places = xp.arange(count).reshape(whole.shape[:dims])[index].reshape(-1)
    width = prod(whole.shape[dims:])
    scatter_add_rows(whole.reshape(count, width), places, values.reshape(places.size, width))


def _taken(xp: Any, x: Array, indices: Array, dim: int) -> Array:
    """``xp.take`` of floats along a dim other than the first; NaN where an index is not there."""
    wrong = (indices < 0) | (indices >= x.shape[dim])
    found = xp.take(x, xp.where(wrong, 0, indices), axis=dim)
    return xp.where(wrong.reshape(*wrong.shape, *(1,) * (x.ndim - dim - 1)), constant(xp, np.array(np.nan, x.dtype)), found)


def check_indices(name: str, indices: Array, n: int) -> None:
    """NumPy would count negative indices from the end, and a GPU would read foreign memory."""
    if indices.size == 0:
        return
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= n:
        wrong = (indices < 0) | (indices >= n)
        place = int(wrong.reshape(-1).argmax())
        row = place // max(1, indices.size // len(indices)) if indices.ndim else 0
        raise DataError(f"{name}: index {int(indices.reshape(-1)[place])} is not in 0 ... {n - 1}", row=row)


def getitem(x: Any, index: Any) -> Tensor:
    """``x[index]``: numbers, slices, None, Ellipsis (a view), or also integer and boolean arrays (a copy).

    As PyTorch reads it: a number chooses first, and is no array, so that ``x[0, :, i]`` is ``x[0][:, i]``.
    """
    x = as_tensor(x)
    first, chosen = parted(x, index)
    if chosen is None:
        return Slice.apply(x, index=first)
    if first:
        x = Slice.apply(x, index=first)
    places = tuple("array" if is_array(e) else e for e in chosen)
    return Gather.apply(x, *(e for e in chosen if is_array(e)), index=places)


def part(x: Any, slices: tuple[slice, ...]) -> Tensor:
    """A copy of ``x[slices]``, which kernels treat as an array that was made so."""
    return Part.apply(as_tensor(x), index=slices)


PLAIN = {int, slice, NoneType, EllipsisType}


def parted(x: Tensor, index: Any) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
    """`index` in two: x[first], a view, and of that x[first][chosen], with arrays and whole dims only; None without arrays."""
    entries = tuple([e if type(e) in PLAIN else _entry(x, e) for e in (index if type(index) is tuple else (index,))])
    if not any(isinstance(e, bool) or is_array(e) for e in entries):
        return entries, None
    if not any(isinstance(e, int) or e is Ellipsis for e in entries):
        return (), entries
    used = sum(e.ndim if _is_mask(e) else not (e is None or e is Ellipsis or isinstance(e, bool)) for e in entries)
    if used > x.ndim or sum(e is Ellipsis for e in entries) > 1:
        raise ShapeError(f"x[...]: an index of {used} dims and {sum(e is Ellipsis for e in entries)} times \"...\" for an array "
                         f"of shape {x.shape}; expected {x.ndim} at most, and one")
    first: list[Any] = []
    chosen: list[Any] = []
    for e in entries:
        if is_array(e):
            first += [slice(None)] * (e.ndim if _is_mask(e) else 1)
            chosen.append(e)
        elif e is Ellipsis:
            first += [slice(None)] * (x.ndim - used)
            chosen += [slice(None)] * (x.ndim - used)
        else:
            first.append(None if isinstance(e, bool) else e)
            if isinstance(e, bool):               # a new dim, of size 1 or 0
                chosen.append(x.xp.zeros(int(e), "int64"))
            elif e is None or isinstance(e, slice):
                chosen.append(slice(None))
    return tuple(first), tuple(chosen)


def _entry(x: Tensor, e: Any) -> Any:
    """One entry of an index: a number, a truth, a slice, None, Ellipsis, or an array of integers or booleans with dims."""
    if isinstance(e, Tensor):
        e = e.array
    elif isinstance(e, list | tuple | range):
        try:
            e = x.xp.asarray([raw(part) for part in e] if len(e) else x.xp.zeros(0, "int64"))
        except (TypeError, ValueError) as error:
            raise ShapeError(f"x[...]: an index is {str(e)[:40]} ({error}), expected integers or booleans") from None
    if is_array(e) or isinstance(e, np.generic):
        if e.dtype.kind not in "iub":
            raise ShapeError(f"x[...]: an index is {e.dtype}, expected integers or booleans; convert it first")
        if e.ndim == 0:
            return e.item()
        return x.xp.asarray(e)
    return e


def _is_mask(e: Any) -> bool:
    return is_array(e) and e.dtype.kind == "b"


def take(x: Any, index: Any, dim: int = 0) -> Tensor:
    """The entries `index` along `dim`; the dims of `index` stand in for `dim`. DataError where one is out of range; on a device,
    floats along the first dim are NaN there.
    """
    return Take.apply(x, index, dim=dim)


def embedding(indices: Any, weight: Any) -> Tensor:
    """Rows `indices` (...) of `weight` (V, D): (..., D). DataError (row, value) where an index is out of range; on a device, such
    a row is NaN.
    """
    return Embedding.apply(indices, weight)
