"""The same values at other places: rolled, flipped, repeated, with dims moved, merged, split or windowed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.index import getitem, take
from mpitrain.ops.inputs import as_array, as_tensor, dim_of, dims_of, integers, sizes_of
from mpitrain.ops.shape import broadcast_to, reshape, transpose

__all__ = ["adjoint", "expand", "expand_as", "flatten", "flip", "fliplr", "flipud", "movedim", "narrow", "permute", "ravel",
           "repeat", "repeat_interleave", "reshape_as", "roll", "rot90", "select", "sum_to_size", "t", "tile", "unflatten",
           "unfold"]


class Roll(Function):
    half = "own"
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, *, shifts: tuple[int, ...], dims: tuple[int, ...]) -> Array:
        ctx.shifts, ctx.dims = shifts, dims
        return ctx.xp.roll(x, shifts, axis=dims)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Roll.apply(grad, shifts=tuple(-n for n in ctx.shifts), dims=ctx.dims)


class Flip(Function):
    half = "own"
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, *, dims: tuple[int, ...]) -> Array:
        ctx.dims = dims
        return ctx.xp.flip(x, axis=dims).copy() if dims else x.copy()

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Flip.apply(grad, dims=ctx.dims)


def roll(x: Any, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
    """`x` shifted along each dim by so many places; what leaves at one end enters at the other. Flat where no dim is given."""
    x = as_tensor(x)
    shifts = tuple(shifts) if isinstance(shifts, Sequence) else (shifts,)
    if dims is None or (isinstance(dims, Sequence) and not dims):
        if len(shifts) != 1:
            raise ShapeError(f"roll: {len(shifts)} shifts and no dims; give as many dims")
        return reshape(Roll.apply(reshape(x, -1) if x.size else reshape(x, 0), shifts=shifts, dims=(0,)), x.shape)
    if not x.ndim:
        raise ShapeError(f"roll: the input has no dims, and dims is {dims}; leave dims out")
    found = tuple(dim_of("roll", x, d) for d in (dims if isinstance(dims, Sequence) else (dims,)))
    if len(found) != len(shifts):
        raise ShapeError(f"roll: {len(shifts)} shifts for {len(found)} dims; give as many of them")
    return Roll.apply(x, shifts=shifts, dims=found)


def flip(x: Any, dims: Any, *more: int) -> Tensor:
    """`x` in reverse order along these dims."""
    x, given = as_tensor(x), sizes_of("flip", (dims, *more) if isinstance(dims, int) else (dims,))
    return Flip.apply(x, dims=dims_of("flip", x, given) if given else ())


def fliplr(x: Any) -> Tensor:
    """`x` in reverse order along dim 1."""
    if len(x.shape) < 2:
        raise ShapeError(f"fliplr: shape {tuple(x.shape)}, expected 2 dims or more")
    return flip(x, 1)


def flipud(x: Any) -> Tensor:
    """`x` in reverse order along dim 0."""
    if not len(x.shape):
        raise ShapeError("flipud: the input has no dims, expected one or more")
    return flip(x, 0)


def rot90(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """`x` turned by k times 90 degrees in the plane of two dims, from the first towards the second."""
    x = as_tensor(x)
    if len(dims) != 2 or x.ndim < 2:
        raise ShapeError(f"rot90: dims {tuple(dims)} of an array of shape {x.shape}; expected two dims of two or more")
    a, b = dims_of("rot90", x, tuple(dims))
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    k %= 4
    if k == 0:
        return x + 0 if x.dtype.kind != "b" else x
    if k == 2:
        return flip(x, a, b)
    return transpose(flip(x, b), tuple(order)) if k == 1 else flip(transpose(x, tuple(order)), b)


def repeat(x: Any, *sizes: Any) -> Tensor:
    """`x` repeated so often along each dim; more numbers than x has dims make new leading ones."""
    x, times = as_tensor(x), sizes_of("repeat", sizes)
    if len(times) < x.ndim or any(n < 0 for n in times):
        raise ShapeError(f"repeat: {times} for an array of shape {x.shape}; expected a number, 0 or more, for each dim at least")
    shape = (1,) * (len(times) - x.ndim) + x.shape
    split = tuple(n for size in shape for n in (1, size))
    wide = tuple(n for pair in zip(times, shape) for n in pair)
    return reshape(broadcast_to(reshape(x, split), wide), tuple(a * b for a, b in zip(times, shape)))


def tile(x: Any, *dims: Any) -> Tensor:
    """`repeat`, where missing numbers are 1, as NumPy's."""
    x, times = as_tensor(x), sizes_of("tile", dims)
    return repeat(x, (1,) * (x.ndim - len(times)) + times)


def repeat_interleave(x: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Tensor:
    """Each element of `x` along `dim` (flat where there is none) repeated so often: one number, or one for each."""
    x = as_tensor(x)
    if dim is None:
        x, dim = reshape(x, -1) if x.size else reshape(x, 0), 0
    dim = dim_of("repeat_interleave", x, dim)
    x = x if x.ndim else reshape(x, 1)
    times = x.xp.asarray(repeats) if isinstance(repeats, int) else integers("repeat_interleave", as_array(repeats), "repeats")
    if times.ndim > 1 or (times.size not in (1, x.shape[dim])) or (times.size and int(times.min()) < 0):
        raise ShapeError(f"repeat_interleave: repeats of shape {times.shape} for dim {dim} of shape {x.shape}; expected one, "
                         "or one for each place, of 0 or more")
    index = x.xp.repeat(x.xp.arange(x.shape[dim]), times if times.size > 1 else int(times.reshape(-1)[0]) if times.size else 1)
    return take(x, index, dim)


def movedim(x: Any, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """`x` with its dims `source` at `destination`, the others in their order."""
    x = as_tensor(x)
    if not x.ndim:
        return x
    a, b = (dims_of("movedim", x, (d,) if isinstance(d, int) else tuple(d)) if d != () else () for d in (source, destination))
    if len(a) != len(b):
        raise ShapeError(f"movedim: {len(a)} dims for {len(b)} places; give as many of them")
    order = [d for d in range(x.ndim) if d not in a]
    for place, d in sorted(zip(b, a)):
        order.insert(place, d)
    return transpose(x, tuple(order))


def permute(x: Any, *dims: Any) -> Tensor:
    """`x` with its dims in the given order."""
    return transpose(as_tensor(x), sizes_of("permute", dims))


def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """`x` with the dims from `start_dim` to `end_dim` as one."""
    x = as_tensor(x)
    start, end = dim_of("flatten", x, start_dim), dim_of("flatten", x, end_dim)
    if start > end:
        raise ShapeError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim}")
    return reshape(x, (*x.shape[:start], prod(x.shape[start:end + 1]), *x.shape[end + 1:]))


def ravel(x: Any) -> Tensor:
    """`x` in one dim."""
    return flatten(x)


def unflatten(x: Any, dim: int, sizes: Sequence[int]) -> Tensor:
    """`x` with `dim` as several, of these sizes; one may be -1."""
    x, sizes = as_tensor(x), sizes_of("unflatten", (tuple(sizes),))
    dim = dim_of("unflatten", x, dim)
    return reshape(x, (*x.shape[:dim], *_filled("unflatten", sizes, x.shape[dim] if x.ndim else 1), *x.shape[dim + 1:]))


def _filled(name: str, sizes: tuple[int, ...], total: int) -> tuple[int, ...]:
    """`sizes`, the one -1 among them replaced so that their product is `total`."""
    known = prod(n for n in sizes if n != -1)
    if sizes.count(-1) == 1 and known and total % known == 0:
        sizes = tuple(total // known if n == -1 else n for n in sizes)
    if prod(sizes) != total or any(n < 0 for n in sizes):
        raise ShapeError(f"{name}: sizes {sizes} do not make up {total}")
    return sizes


def expand(x: Any, *sizes: Any) -> Tensor:
    """`broadcast_to`, where -1 stands for the size that x has there."""
    x, shape = as_tensor(x), sizes_of("expand", sizes)
    own = (1,) * (len(shape) - x.ndim) + x.shape
    if len(shape) < x.ndim or any(n == -1 for n in shape[:len(shape) - x.ndim]):
        raise ShapeError(f"expand: shape {x.shape} does not expand to {shape}")
    return broadcast_to(x, tuple(b if a == -1 else a for a, b in zip(shape, own)))


def expand_as(x: Any, other: Any) -> Tensor:
    """`x` broadcast to the shape of `other`."""
    return expand(x, tuple(other.shape))


def reshape_as(x: Any, other: Any) -> Tensor:
    """`x` in the shape of `other`."""
    return reshape(as_tensor(x), tuple(other.shape))


def sum_to_size(x: Any, *sizes: Any) -> Tensor:
    """`x` summed over the dims that a tensor of that shape would be broadcast along."""
    x, shape = as_tensor(x), sizes_of("sum_to_size", sizes)
    extra = x.ndim - len(shape)
    if extra < 0 or any(b not in (1, a) for a, b in zip(x.shape[extra:], shape)):
        raise ShapeError(f"sum_to_size: a tensor of shape {shape} does not broadcast to shape {x.shape}")
    dims = tuple(d for d, n in enumerate(x.shape) if d < extra or shape[d - extra] != n)
    return reshape(x.sum(dims), shape) if dims else x


def t(x: Any) -> Tensor:
    """A matrix transposed; fewer dims stay as they are."""
    x = as_tensor(x)
    if x.ndim > 2:
        raise ShapeError(f"t: shape {x.shape}, expected 2 dims at most; use transpose or mT")
    return transpose(x) if x.ndim == 2 else x


def adjoint(x: Any) -> Tensor:
    """`x` with its last two dims swapped, and conjugated where it is complex (Hermitian transpose)."""
    x = as_tensor(x)
    if x.ndim < 2:
        raise ShapeError(f"adjoint: shape {x.shape}, expected 2 dims or more")
    turned = transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))
    if turned.dtype.kind != "c":
        return turned
    from mpitrain.ops.complex_numbers import conj
    return conj(turned)


def select(x: Any, dim: int, index: int) -> Tensor:
    """x at one place along `dim`, which is gone."""
    x = as_tensor(x)
    if not x.ndim:
        raise ShapeError("select: the input has no dims, expected one or more")
    dim = dim_of("select", x, dim)
    index = int(index)
    if not -x.shape[dim] <= index < x.shape[dim]:
        raise ShapeError(f"select: index {index} along dim {dim} of shape {x.shape}")
    return getitem(x, (slice(None),) * dim + (index,))


def narrow(x: Any, dim: int, start: Any, length: int) -> Tensor:
    """`length` places of x along `dim`, from `start` on."""
    x = as_tensor(x)
    dim = dim_of("narrow", x, dim)
    if not isinstance(start, int | np.integer):
        if (place := as_array(start)).dtype.kind not in "iu" or place.ndim:
            raise ShapeError(f"narrow: start is {place.dtype} of shape {place.shape}, expected one integer")
        start = int(place)
    size = x.shape[dim] if x.ndim else 0
    start = start + size if start < 0 else start
    if not x.ndim or start < 0 or length < 0 or start + length > size:
        raise ShapeError(f"narrow: {length} places from {start} on along dim {dim} of shape {x.shape}")
    return getitem(x, (slice(None),) * dim + (slice(start, start + length),))


def unfold(x: Any, dim: int, size: int, step: int) -> Tensor:
    """Windows of `size` along `dim`, each `step` further on: their number stands there, and their places in a new last dim."""
    x = as_tensor(x)
    dim = dim_of("unfold", x, dim)
    if not x.ndim and size in (0, 1):
        return reshape(x, 1)[:size]
    if not 0 <= size <= (x.shape[dim] if x.ndim else 1) or step < 1:
        raise ShapeError(f"unfold: windows of {size} places, {step} apart, along dim {dim} of shape {x.shape}")
    xp = x.xp
    windows = take(x, xp.arange(0, x.shape[dim] - size + 1, step)[:, None] + xp.arange(size), dim)
    return movedim(windows, dim + 1, -1)
