"""Diagonals and triangles of matrices."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, array_module
from mpitrain.errors import ShapeError
from mpitrain.kernels import lines as kernels
from mpitrain.ops.choice import where
from mpitrain.ops.inputs import as_tensor, dim_of
from mpitrain.ops.reduce import sum as total
from mpitrain.ops.shape import reshape

__all__ = ["block_diag", "diag", "diag_embed", "diagflat", "diagonal", "diagonal_scatter", "select_scatter", "slice_scatter",
           "trace", "tril", "tril_indices", "triu", "triu_indices"]


class Diagonal(Function):
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, *, offset: int, dims: tuple[int, int]) -> Array:
        ctx.offset, ctx.dims, ctx.sizes = offset, dims, (x.shape[dims[0]], x.shape[dims[1]])
        return ctx.xp.diagonal(x, offset, *dims).copy()

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return DiagEmbed.apply(grad, offset=ctx.offset, dims=ctx.dims, sizes=ctx.sizes)


class DiagEmbed(Function):
    """Matrices of these sizes, in the dims `dims` of the result, with the last dim of x on their diagonal."""

    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, *, offset: int, dims: tuple[int, int], sizes: tuple[int, int]) -> Array:
        ctx.offset, ctx.dims = offset, dims
        out = ctx.xp.zeros((*x.shape[:-1], *sizes), x.dtype)
        places = ctx.xp.arange(x.shape[-1])
        out[..., places + max(-offset, 0), places + max(offset, 0)] = x
        return ctx.xp.moveaxis(out, (-2, -1), dims)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Diagonal.apply(grad, offset=ctx.offset, dims=ctx.dims)


def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """The diagonal of the matrices in two dims, in a new last dim; `offset` above 0 is above the main one."""
    x = as_tensor(x)
    if x.ndim < 2:
        raise ShapeError(f"diagonal: shape {x.shape}, expected 2 dims or more")
    dims = dim_of("diagonal", x, dim1), dim_of("diagonal", x, dim2)
    if dims[0] == dims[1]:
        raise ShapeError(f"diagonal: dim1 {dim1} and dim2 {dim2} are the same; give two")
    return Diagonal.apply(x, offset=offset, dims=dims)


def diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Square matrices, in two dims of the result, with the last dim of x on their diagonal."""
    x = as_tensor(x)
    if not x.ndim:
        raise ShapeError("diag_embed: the input has no dims, expected one or more")
    dims = dim_of("diag_embed", x, dim1, 1), dim_of("diag_embed", x, dim2, 1)
    if dims[0] == dims[1]:
        raise ShapeError(f"diag_embed: dim1 {dim1} and dim2 {dim2} are the same; give two")
    size = x.shape[-1] + abs(offset)
    return DiagEmbed.apply(x, offset=offset, dims=dims, sizes=(size, size))


def diag(x: Any, diagonal: int = 0) -> Tensor:
    """The diagonal of a matrix, or the matrix with a vector on its diagonal."""
    x = as_tensor(x)
    if x.ndim not in (1, 2):
        raise ShapeError(f"diag: shape {x.shape}, expected 1 or 2 dims")
    return diag_embed(x, diagonal) if x.ndim == 1 else Diagonal.apply(x, offset=diagonal, dims=(0, 1))


def diagflat(x: Any, offset: int = 0) -> Tensor:
    """The matrix with all values of x on its diagonal."""
    x = as_tensor(x)
    return diag_embed(reshape(x, -1) if x.size else reshape(x, 0), offset)


def diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """A copy of x whose diagonal is `src`; see `diagonal`."""
    x, src = as_tensor(x), as_tensor(src)
    here = diagonal(x, offset, dim1, dim2)
    if here.shape != src.shape:
        raise ShapeError(f"diagonal_scatter: a source of shape {src.shape} for a diagonal of shape {here.shape}")
    dims = dim_of("diagonal_scatter", x, dim1), dim_of("diagonal_scatter", x, dim2)
    sizes = x.shape[dims[0]], x.shape[dims[1]]
    chosen = DiagEmbed.apply(x.xp.ones(here.shape, bool), offset=offset, dims=dims, sizes=sizes)
    return where(chosen, DiagEmbed.apply(src, offset=offset, dims=dims, sizes=sizes), x)


def select_scatter(x: Any, src: Any, dim: int, index: int) -> Tensor:
    """A copy of x which is `src` at one place along `dim`."""
    return _scattered("select_scatter", x, src, dim, index)


def slice_scatter(x: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    """A copy of x which is `src` at start:end:step along `dim`."""
    return _scattered("slice_scatter", x, src, dim, slice(start, end, step))


def _scattered(name: str, x: Any, source: Any, dim: int, places: Any) -> Tensor:
    from mpitrain.ops.scattering import Put
    x, source = as_tensor(x), as_tensor(source)
    index = (slice(None),) * dim_of(name, x, dim) + (places,)
    try:
        fits = x.array[index].shape == source.shape
    except IndexError:
        raise ShapeError(f"{name}: no place {places} along dim {dim} of shape {x.shape}") from None
    if not fits:
        raise ShapeError(f"{name}: a source of shape {source.shape} for places of shape {x.array[index].shape}")
    return Put.apply(x, source, index=index)


def trace(x: Any) -> Tensor:
    """The sum of the diagonal of a matrix."""
    if len(x.shape) != 2:
        raise ShapeError(f"trace: shape {tuple(x.shape)}, expected 2 dims")
    return total(diagonal(x))


def _triangle(name: str, x: Any, diagonal: int, upper: bool) -> Tensor:
    x = as_tensor(x)
    if x.ndim < 2:
        raise ShapeError(f"{name}: shape {x.shape}, expected 2 dims or more")
    return Triangle.apply(x, diagonal=diagonal, upper=upper)


class Triangle(Function):
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, *, diagonal: int, upper: bool) -> Array:
        ctx.diagonal, ctx.upper = diagonal, upper
        return kernels.triangle(x, diagonal, upper)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Triangle.apply(grad, diagonal=ctx.diagonal, upper=ctx.upper)


def tril(x: Any, diagonal: int = 0) -> Tensor:
    """The lower triangles of matrices, `diagonal` included, and 0 elsewhere."""
    return _triangle("tril", x, diagonal, upper=False)


def triu(x: Any, diagonal: int = 0) -> Tensor:
    """The upper triangles of matrices, `diagonal` included, and 0 elsewhere."""
    return _triangle("triu", x, diagonal, upper=True)


def tril_indices(row: int, col: int, offset: int = 0, *, dtype: Any = "int64") -> Tensor:
    """(2, N): rows and columns of the lower triangle of a matrix."""
    xp = array_module()
    return Tensor(xp.stack(xp.tril_indices(row, offset, col)).astype(dtype))


def triu_indices(row: int, col: int, offset: int = 0, *, dtype: Any = "int64") -> Tensor:
    """(2, N): rows and columns of the upper triangle of a matrix."""
    xp = array_module()
    return Tensor(xp.stack(xp.triu_indices(row, offset, col)).astype(dtype))


def block_diag(*matrices: Any) -> Tensor:
    """Matrices one after the other along the diagonal of a matrix; fewer dims count as rows."""
    parts = [reshape(x, (1,) * (2 - x.ndim) + x.shape) if x.ndim < 2 else x for x in map(as_tensor, matrices)]
    if any(x.ndim > 2 for x in parts):
        raise ShapeError(f"block_diag: shapes {', '.join(str(x.shape) for x in parts)}, expected 2 dims at most")
    from mpitrain.ops.scattering import Put
    if not parts:
        return Tensor(array_module().zeros((1, 0), "float32"))
    out = Tensor(parts[0].xp.zeros((sum(x.shape[0] for x in parts), sum(x.shape[1] for x in parts)), parts[0].dtype))
    row = column = 0
    for x in parts:
        out = Put.apply(out, x, index=(slice(row, row + x.shape[0]), slice(column, column + x.shape[1])))
        row, column = row + x.shape[0], column + x.shape[1]
    return out
