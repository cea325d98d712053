"""Values taken from places along a dim, and put or added there. Sums run in the order of the index: the same bits everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, is_array, is_float
from mpitrain.errors import ShapeError
from mpitrain.kernels import lines as kernels
from mpitrain.kernels.rows import scatter_add_rows
from mpitrain.ops.choice import where
from mpitrain.ops.creation import astype
from mpitrain.ops.index import getitem, take
from mpitrain.ops.inputs import as_array, as_tensor, dim_of, fitting, integers
from mpitrain.ops.shape import broadcast_to, reshape, transpose

__all__ = ["gather", "index_add", "index_copy", "index_put", "index_select", "scatter", "scatter_add", "take_along_dim"]


class Places(Function):
    """int64 places that a kernel finds in x: `find(x, ..., *options)`. No gradient flows through them."""

    @staticmethod
    def forward(ctx: Context, *arrays: Array, find: Callable[..., Array], options: tuple[Any, ...] = ()) -> Array:
        return find(*arrays, *options)


def places_of(find: Callable[..., Array], arrays: tuple[Array, ...], *options: Any) -> Array:
    return Places.apply(*arrays, find=find, options=options).array


class GatherAlong(Function):
    """x[..., index[..., i, ...], ...] along `dim`."""

    @staticmethod
    def forward(ctx: Context, x: Array, index: Array, *, dim: int) -> Array:
        ctx.index, ctx.dim, ctx.shape = index, dim, x.shape
        return kernels.gather(x, index, dim)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        return kernels.scatter(ctx.xp.zeros(ctx.shape, grad.dtype), ctx.index, grad, ctx.dim, True), None

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return Scatter.apply(ctx.xp.zeros(ctx.shape, grad.dtype), ctx.index, grad, dim=ctx.dim, add=True), None


class Scatter(Function):
    """A copy of x with `source` at those places along `dim`, the last one of several, or added there."""

    @staticmethod
    def forward(ctx: Context, x: Array, index: Array, source: Array, *, dim: int, add: bool) -> Array:
        check_fits(source, x)
        ctx.index, ctx.dim, ctx.shape, ctx.add = index, dim, source.shape, add
        part = source[tuple(slice(0, n) for n in index.shape)]
        return kernels.scatter(x.copy(order="C"), index, part, dim, add)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        by_x = by_source = None
        if ctx.needs[0]:
            by_x = grad if ctx.add else Scatter.apply(
                grad, ctx.index, ctx.xp.zeros(ctx.index.shape, grad.dtype), dim=ctx.dim, add=False)
        if ctx.needs[2]:
            by_source = widened(GatherAlong.apply(grad, ctx.index, dim=ctx.dim), ctx.shape)
        return by_x, None, by_source


def check_fits(values: Any, x: Array) -> None:
    if is_array(values) and is_float(values.dtype) and x.dtype.kind != "c" and not is_float(x.dtype):
        raise ShapeError(f"values of {values.dtype} do not fit in an array of {x.dtype}; convert one of them first")


class Put(Function):
    """A copy of x with `values` at x[index], or added there."""

    @staticmethod
    def forward(ctx: Context, x: Array, values: Any, *, index: Any, accumulate: bool = False) -> Array:
        out = x.copy()
        check_fits(values, x)
        ctx.index, ctx.accumulate, ctx.shape = index, accumulate, getattr(values, "shape", ())
        try:
            if accumulate:
                ctx.xp.add.at(out, index, values)
            else:
                out[index] = values
        except (IndexError, ValueError):
            raise ShapeError(f"index_put: values of shape {ctx.shape} at these places of an array of shape {x.shape}: the places "
                             "must exist, and the values broadcast to them") from None
        return out

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        by_values = None
        if ctx.needs[1]:
            by_values = _summed_to(getitem(grad, ctx.index), ctx.shape)
        return grad if ctx.accumulate or not ctx.needs[0] else Put.apply(grad, 0, index=ctx.index), by_values


def _summed_to(grad: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`grad` summed over the dims along which values of that shape were repeated."""
    extra = grad.ndim - len(shape)
    dims = tuple(i for i, n in enumerate(grad.shape) if i < extra or shape[i - extra] != n)
    return reshape(grad.sum(dims), shape) if dims else grad


def widened(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x with zeros at the ends of its dims, up to that shape."""
    if x.shape == shape:
        return x
    return Put.apply(x.xp.zeros(shape, x.dtype), x, index=tuple(slice(0, n) for n in x.shape))


def checked(name: str, x: Tensor, dim: Any, index: Any, source: Any = None) -> tuple[Tensor, int, Array, Any]:
    """What gather and scatter want to be true of their arguments; arrays without dims get one."""
    dim, index = dim_of(name, x, dim), integers(name, as_array(index))
    if x.ndim == 0 or index.ndim == 0 or (source is not None and source.ndim == 0):
        x, index = (reshape(x, 1) if x.ndim == 0 else x), (index.reshape(1) if index.ndim == 0 else index)
        source = reshape(source, 1) if source is not None and source.ndim == 0 else source
    if index.size and (index.ndim != x.ndim or any(
            index.shape[d] > x.shape[d] for d in range(x.ndim) if d != dim)):
        raise ShapeError(f"{name}: an index of shape {index.shape} for an array of shape {x.shape}; it must have as many dims, "
                         f"and be no larger but along dim {dim}")
    if source is not None and source.dtype != x.dtype:
        raise ShapeError(f"{name}: a source of {source.dtype} for an array of {x.dtype}; convert one of them first")
    if source is not None and index.size and (index.ndim != source.ndim or any(
            a > b for a, b in zip(index.shape, source.shape))):
        raise ShapeError(f"{name}: an index of shape {index.shape} for a source of shape {source.shape}; it may be no larger")
    within(name, index, x.shape[dim] if x.ndim > dim else 1)
    return x, dim, index, source


def within(name: str, index: Array, n: int) -> None:
    if index.size and int(index.view(index.dtype.str.replace("i", "u")).max()) >= n:        # below 0 is large without a sign
        wrong = index[(index < 0) | (index >= n)].reshape(-1)[0]
        raise ShapeError(f"{name}: index {int(wrong)} is not in 0 ... {n - 1}")


def gather(x: Any, dim: int, index: Any) -> Tensor:
    """x[index[i, j], j] for dim 0 of two, x[i, index[i, j]] for dim 1; of the shape of `index`."""
    x = as_tensor(x)
    shape = as_array(index).shape
    x, dim, index, _ = checked("gather", x, dim, index)
    if not index.size:
        return Tensor(x.xp.zeros(shape, x.dtype)) if not x.requires_grad else x.sum() * x.xp.zeros(shape, x.dtype)
    found = GatherAlong.apply(x, index, dim=dim)
    return found if found.shape == shape else reshape(found, shape)


def scatter_add(x: Any, dim: int, index: Any, src: Any) -> Tensor:
    """A copy of x with `src` added at x[index[i, j], j] for dim 0 of two, and so on; sums in the order of the index."""
    x = as_tensor(x)
    shape = x.shape
    wide, dim, index, src = checked("scatter_add", x, dim, index, as_tensor(src))
    if not index.size:
        return x + 0
    return reshape(Scatter.apply(wide, index, src, dim=dim, add=True), shape)


def scatter(x: Any, dim: int, index: Any, src: Any = None, *, value: Any = None, reduce: str | None = None) -> Tensor:
    """A copy of x with `src`, or the number `value`, at x[index[i, j], j] for dim 0 of two, and so on.

    Of several at one place the last one counts; `reduce` "add" adds all of them. Every one of them has the gradient of its place,
    as PyTorch's: what is not the last has it, too. Of a `value` each place counts once.
    """
    x = as_tensor(x)
    shape = x.shape
    if (src is None) == (value is None):
        raise ShapeError("scatter: give a source or a value, one of them")
    if reduce not in (None, "add"):
        raise ShapeError(f'scatter: reduce is {reduce!r}, expected None or "add"; scatter_reduce has the others')
    value = src if isinstance(src, int | float) else value
    wide, dim, index, source = checked("scatter", x, dim, index, as_tensor(src) if value is None else None)
    if value is not None:
        learned = isinstance(value, Tensor) and value.requires_grad and not value.ndim
        value = astype(value, x.dtype) if learned else fitting("scatter", value, x.dtype)
    if not index.size:
        return x + 0
    if source is not None:
        return reshape(Scatter.apply(wide, index, source, dim=dim, add=reduce == "add"), shape)
    places = kernels.grid(wide.xp, index, dim)
    if reduce == "add":
        return reshape(Put.apply(wide, value, index=places, accumulate=True), shape)
    chosen = wide.xp.zeros(wide.shape, bool)
    chosen[places] = True
    return reshape(where(chosen, value, wide), shape)


def take_along_dim(x: Any, indices: Any, dim: int | None = None) -> Tensor:
    """`gather`, whose index and x broadcast against each other; along all of x, flat, where `dim` is None."""
    x, index = as_tensor(x), integers("take_along_dim", as_array(indices))
    if dim is None:
        return gather(reshape(x, -1), 0, index.reshape(-1))
    dim = dim_of("take_along_dim", x, dim)
    if index.ndim != x.ndim:
        raise ShapeError(f"take_along_dim: an index of shape {index.shape} for an array of shape {x.shape}; it wants as many")
    index = index + (index < 0) * x.shape[dim]
    shapes = [(1 if d == dim else a, 1 if d == dim else b) for d, (a, b) in enumerate(zip(x.shape, index.shape))]
    if any(a != b and 1 not in (a, b) for a, b in shapes):
        raise ShapeError(f"take_along_dim: shapes {x.shape} and {index.shape} do not broadcast besides dim {dim}")
    common = [max(a, b) if a and b else 0 for a, b in shapes]
    x = broadcast_to(x, [x.shape[d] if d == dim else n for d, n in enumerate(common)])
    return gather(x, dim, x.xp.broadcast_to(index, [index.shape[d] if d == dim else n for d, n in enumerate(common)]))


def _rows_index(name: str, x: Tensor, dim: Any, index: Any) -> tuple[int, Array]:
    dim, index = dim_of(name, x, dim), integers(name, as_array(index))
    if index.ndim > 1:
        raise ShapeError(f"{name}: the index has shape {index.shape}, expected one dim")
    within(name, index, x.shape[dim] if x.ndim else 1)
    return dim, index.reshape(-1)


class IndexAdd(Function):
    """Along the first dim."""

    @staticmethod
    def forward(ctx: Context, x: Array, index: Array, source: Array) -> Array:
        ctx.index = index
        out = x.copy(order="C")
        width = math.prod(x.shape[1:])
        scatter_add_rows(out.reshape(len(out), width), index, source.reshape(index.size, width))
        return out

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return grad, None, take(grad, ctx.index, 0) if ctx.needs[2] else None


def index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Tensor:
    """A copy of x with the rows of `source` (along `dim`) times `alpha` added to its rows `index`, in their order."""
    x, source = as_tensor(x), as_tensor(source)
    dim, index = _rows_index("index_add", x, dim, index)
    if x.ndim == 0:
        return reshape(index_add(reshape(x, 1), 0, index, reshape(source, -1), alpha=alpha), ())
    source = reshape(source, 1) if source.ndim == 0 else source
    if source.shape != (*x.shape[:dim], index.size, *x.shape[dim + 1:]):
        raise ShapeError(f"index_add: a source of shape {source.shape} and {index.size} rows along dim {dim} of shape {x.shape} "
                         "do not fit")
    source = source if alpha == 1 else source * alpha
    order = (dim, *(d for d in range(x.ndim) if d != dim))
    made = IndexAdd.apply(transpose(x, order), index, transpose(source, order))
    return transpose(made, tuple(sorted(range(x.ndim), key=lambda d: order[d])))


def index_select(x: Any, dim: int, index: Any) -> Tensor:
    """The rows `index` of x along `dim`."""
    x = as_tensor(x)
    dim, index = _rows_index("index_select", x, dim, index)
    return take(x, index, dim) if x.ndim else reshape(take(reshape(x, 1), index, 0), ())


def index_copy(x: Any, dim: int, index: Any, source: Any) -> Tensor:
    """A copy of x whose rows `index` along `dim` are those of `source`."""
    x, source = as_tensor(x), as_tensor(source)
    dim, index = _rows_index("index_copy", x, dim, index)
    if x.ndim == 0:
        return reshape(index_copy(reshape(x, 1), 0, index, reshape(source, 1)), ())
    return Put.apply(x, source, index=(slice(None),) * dim + (index,))


def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Tensor:
    """A copy of x with x[indices] = values, or += with `accumulate`, where a place may come several times."""
    if any(i is None for i in indices):
        raise ShapeError("index_put: an index is None, expected tensors; move the dims that are taken whole to the "
                         "end (movedim), or write x[:, i] = values under no_grad()")
    index = tuple(map(as_array, indices))
    return Put.apply(as_tensor(x), as_tensor(values), index=index, accumulate=accumulate)
