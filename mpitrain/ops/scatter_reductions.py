"""Sums, products, means and extrema of what is scattered to one place."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.backend.ufuncs import at
from mpitrain.errors import ShapeError
from mpitrain.kernels.lines import grid
from mpitrain.ops.choice import where
from mpitrain.ops.inputs import as_array, as_tensor, dim_of, integers
from mpitrain.ops.scattering import Put, checked, gather, scatter_add, widened
from mpitrain.ops.shape import reshape

__all__ = ["index_reduce", "scatter_reduce"]

KINDS = ("sum", "prod", "mean", "amin", "amax")


class ScatterExtremum(Function):
    """The largest or smallest of x and what comes to its place; equal ones share the gradient equally."""

    @staticmethod
    def forward(ctx: Context, x: Array, index: Array, source: Array, *, dim: int, ufunc: str) -> Array:
        out, places = x.copy(), grid(ctx.xp, index, dim)
        part = source[tuple(slice(0, n) for n in index.shape)]
        at(ufunc, out, places, part)
        mine, theirs = x == out, part == out[places]
        count = mine.astype(x.dtype)
        ctx.xp.add.at(count, places, theirs.astype(x.dtype))
        ctx.index, ctx.dim, ctx.shape = index, dim, source.shape
        ctx.mine, ctx.theirs = mine / ctx.xp.maximum(count, 1), theirs.astype(x.dtype)
        ctx.count = ctx.xp.maximum(count, 1)
        return out

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        shared = gather(grad / Tensor(ctx.count), ctx.dim, ctx.index) * Tensor(ctx.theirs)
        return grad * Tensor(ctx.mine.astype(grad.dtype)), None, widened(shared, ctx.shape)


class ScatterProduct(Function):
    """x times what comes to its place; the gradient divides by nothing that is 0."""

    @staticmethod
    def forward(ctx: Context, x: Array, index: Array, source: Array, *, dim: int) -> Array:
        places, part = grid(ctx.xp, index, dim), source[tuple(slice(0, n) for n in index.shape)]
        out = x.copy()
        at("multiply", out, places, part)
        ctx.save(x, part)
        ctx.places, ctx.shape = places, source.shape
        return out

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        x, part = ctx.saved
        xp, places = ctx.xp, ctx.places
        product, zeros = xp.where(x == 0, 1, x).astype(x.dtype), (x == 0).astype("int64")
        at("multiply", product, places, xp.where(part == 0, 1, part).astype(x.dtype))
        xp.add.at(zeros, places, (part == 0).astype("int64"))

        def others(value: Array, product: Array, zeros: Array) -> Array:
            """The product of all but this one."""
            none, nonzero = zeros - (value == 0) == 0, xp.where(value == 0, 1, value).astype(value.dtype)
            return xp.where(none, product / nonzero, 0).astype(value.dtype)
        by_source = xp.zeros(ctx.shape, grad.dtype)
        by_source[tuple(slice(0, n) for n in part.shape)] = grad[places] * others(part, product[places], zeros[places])
        return grad * others(x, product, zeros), None, by_source


def scatter_reduce(x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Tensor:
    """A copy of x, reduced with `src` at the places of `index` along `dim`: "sum", "prod", "mean", "amin" or "amax".

    Without `include_self` what x has at those places does not count. Equal extrema share the gradient equally.
    """
    if reduce not in KINDS:
        raise ShapeError(f"scatter_reduce: reduce is {reduce!r}, expected one of {', '.join(KINDS)}")
    x = as_tensor(x)
    shape = x.shape
    wide, dim, index, src = checked("scatter_reduce", x, dim, index, as_tensor(src))
    if not index.size:
        return x + 0
    places = grid(wide.xp, index, dim)
    if not include_self:
        start = {"sum": 0, "mean": 0, "prod": 1, "amin": float("inf"), "amax": float("-inf")}[reduce]
        wide = Put.apply(wide, start, index=places)
    if reduce in ("amin", "amax"):
        made = ScatterExtremum.apply(wide, index, src, dim=dim, ufunc="minimum" if reduce == "amin" else "maximum")
    elif reduce == "prod":
        made = ScatterProduct.apply(wide, index, src, dim=dim)
    else:
        made = scatter_add(wide, dim, index, src)
        if reduce == "mean":
            count = wide.xp.full(wide.shape, int(include_self), wide.dtype)
            wide.xp.add.at(count, places, count.dtype.type(1))
            made = made / Tensor(where(count < 1, 1, count).array.astype(wide.dtype))
    return reshape(made, shape)


def index_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Tensor:
    """`scatter_reduce` of the rows of `source` along `dim` to the rows `index` (one dim) of x."""
    x, source = as_tensor(x), as_tensor(source)
    dim, index = dim_of("index_reduce", x, dim), integers("index_reduce", as_array(index)).reshape(-1)
    if source.ndim and index.size != source.shape[dim]:
        raise ShapeError(f"index_reduce: {index.size} rows for a source of shape {source.shape} along dim {dim}")
    rows = x.xp.broadcast_to(index.reshape((-1,) + (1,) * max(source.ndim - 1 - dim, 0)), source.shape or (1,))
    return scatter_reduce(x, dim, rows, source, reduce, include_self=include_self)
