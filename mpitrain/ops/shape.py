"""Other shapes of the same values; most results show the input's memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.inputs import as_tensor

__all__ = ["broadcast_to", "concatenate", "expand_dims", "pad", "reshape", "split", "squeeze", "stack", "swapaxes", "transpose"]


class Reshape(Function):
    half = "own"
    complex_inputs = "analytic"
    views = True

    @staticmethod
    def forward(ctx: Context, x: Array, *, shape: tuple[int, ...]) -> Array:
        ctx.shape = x.shape
        try:
            return x.reshape(shape)
        except ValueError:
            raise ShapeError(f"reshape: {x.size} values of shape {x.shape} do not fill the shape {shape}") from None

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return grad.reshape(ctx.shape)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad.reshape(ctx.shape)


class Transpose(Function):
    half = "own"
    complex_inputs = "analytic"
    views = True

    @staticmethod
    def forward(ctx: Context, x: Array, *, dims: tuple[int, ...]) -> Array:
        if sorted(d % x.ndim for d in dims) != list(range(x.ndim)):
            raise ShapeError(f"transpose: dims {dims} are no order of the {x.ndim} dims of shape {x.shape}")
        ctx.back = [0] * x.ndim
        for i, d in enumerate(dims):
            ctx.back[d] = i
        return x.transpose(dims)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return grad.transpose(ctx.back)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad.transpose(ctx.back)


class BroadcastTo(Function):
    half = "own"
    complex_inputs = "analytic"
    views = True
    broadcasts = True

    @staticmethod
    def forward(ctx: Context, x: Array, *, shape: tuple[int, ...]) -> Array:
        try:
            return ctx.xp.broadcast_to(x, shape)
        except ValueError:
            raise ShapeError(f"broadcast_to: shape {x.shape} does not broadcast to {shape}") from None

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return grad


class Concatenate(Function):
    half = "own"
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, *arrays: Array, dim: int) -> Array:
        first = arrays[0]
        ctx.dim = dim % first.ndim if -first.ndim <= dim < first.ndim else first.ndim
        if any(x.shape[:ctx.dim] != first.shape[:ctx.dim] or x.shape[ctx.dim + 1:] != first.shape[ctx.dim + 1:]
               or x.ndim <= ctx.dim for x in arrays):
            raise ShapeError(f"concatenate along dim {dim}: shapes {', '.join(str(x.shape) for x in arrays)} do not fit")
        ctx.sizes = [x.shape[ctx.dim] for x in arrays]
        return ctx.xp.concatenate(arrays, axis=ctx.dim)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        return _parts(grad, ctx.sizes, ctx.dim)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return split(grad, ctx.sizes, ctx.dim)


class Split(Function):
    half = "own"
    complex_inputs = "analytic"
    views = True

    @staticmethod
    def forward(ctx: Context, x: Array, *, sizes: tuple[int, ...], dim: int) -> tuple[Array, ...]:
        ctx.dim = dim
        return _parts(x, sizes, dim)

    @staticmethod
    def backward(ctx: Context, *grads: Array) -> Array:
        return ctx.xp.concatenate(grads, axis=ctx.dim)

    @staticmethod
    def derivative(ctx: Context, *grads: Tensor) -> Tensor:
        return concatenate(grads, ctx.dim)


class Pad(Function):
    half = "own"
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, *, widths: tuple[tuple[int, int], ...], value: float) -> Array:
        sizes = [n + before + after for n, (before, after) in zip(x.shape, widths)]
        if any(n + min(before, 0) + min(after, 0) < 0 for n, (before, after) in zip(x.shape, widths)):
            raise ShapeError(f"pad: widths {widths} take away more than shape {x.shape} has")
        out = ctx.xp.full(sizes, value, dtype=x.dtype)
        ctx.widths = widths
        ctx.inside = tuple(slice(max(before, 0), size - max(after, 0)) for size, (before, after) in zip(sizes, widths))
        kept = tuple(slice(max(-before, 0), n - max(-after, 0)) for n, (before, after) in zip(x.shape, widths))
        out[ctx.inside] = x[kept]
        return out

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Pad.apply(grad, widths=tuple((-before, -after) for before, after in ctx.widths), value=0.0)


def _parts(x: Array, sizes: Sequence[int], dim: int) -> tuple[Array, ...]:
    parts, start = [], 0
    for size in sizes:
        parts.append(x[(slice(None),) * dim + (slice(start, start + size),)])
        start += size
    return tuple(parts)


def reshape(x: Any, *shape: Any) -> Tensor:
    """`x` with another shape, given as numbers or one tuple; -1 stands for what is left."""
    return Reshape.apply(x, shape=_numbers(shape))


def transpose(x: Any, *dims: Any) -> Tensor:
    """`x` with its dims in the given order, reversed where none is given; two numbers swap those dims, as PyTorch's do."""
    if len(dims) == 2:
        return swapaxes(x, *dims)
    order = _numbers(dims) if dims else tuple(reversed(range(len(x.shape))))
    return Transpose.apply(x, dims=order)


def swapaxes(x: Any, dim0: int, dim1: int) -> Tensor:
    """`x` with two of its dims in each other's place."""
    order = list(range(len(x.shape)))
    for dim in (dim0, dim1):
        if not -len(order) <= dim < len(order):
            raise ShapeError(f"swapaxes: dim {dim} of an array with {len(order)} dims, shape {tuple(x.shape)}")
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return Transpose.apply(x, dims=tuple(order))


def broadcast_to(x: Any, shape: Sequence[int]) -> Tensor:
    """`x` repeated along dims of size 1 and new leading ones, without a copy."""
    return BroadcastTo.apply(x, shape=tuple(shape))


def squeeze(x: Any, dim: int | Sequence[int] | None = None) -> Tensor:
    """`x` without its dims of size 1, or without that one, or those."""
    shape = x.shape
    if isinstance(dim, Sequence):
        for d in sorted((d + len(shape) if d < 0 else d for d in dim), reverse=True):
            x = squeeze(x, d)
        return x
    if dim is not None and not -len(shape) <= dim < len(shape):
        raise ShapeError(f"squeeze: dim {dim} of an array with {len(shape)} dims, shape {shape}")
    if dim is not None and shape[dim] != 1:
        raise ShapeError(f"squeeze: dim {dim} of shape {shape} is not 1")
    gone = [i for i, n in enumerate(shape) if n == 1 and (dim is None or i == dim % len(shape))]
    return Reshape.apply(x, shape=tuple(n for i, n in enumerate(shape) if i not in gone))


def expand_dims(x: Any, dim: int) -> Tensor:
    """`x` with a new dim of size 1, which is dim `dim` of the result."""
    shape = list(x.shape)
    if not -len(shape) - 1 <= dim <= len(shape):
        raise ShapeError(f"expand_dims: dim {dim} of a result with {len(shape) + 1} dims")
    shape.insert(dim % (len(shape) + 1), 1)
    return Reshape.apply(x, shape=tuple(shape))


def concatenate(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    if not isinstance(tensors, list | tuple):
        raise _no_list("concatenate", tensors)
    if not tensors:
        raise ShapeError("concatenate needs at least one tensor")
    return Concatenate.apply(*tensors, dim=dim)


def _no_list(name: str, tensors: Any) -> ShapeError:
    found = f"one of shape {tuple(tensors.shape)}" if hasattr(tensors, "shape") else type(tensors).__name__
    return ShapeError(f"{name}: expected a list of tensors, found {found}; write ops.{name}([x, y])")


def stack(tensors: Sequence[Any], dim: int = 0) -> Tensor:
    """Tensors of one shape along a new dim `dim`."""
    if not isinstance(tensors, list | tuple):
        raise _no_list("stack", tensors)
    tensors = [x if hasattr(x, "shape") else as_tensor(x) for x in tensors]
    if len({tuple(x.shape) for x in tensors}) > 1:
        raise ShapeError(f"stack: shapes {', '.join(str(tuple(x.shape)) for x in tensors)} differ")
    return concatenate([expand_dims(x, dim) for x in tensors], dim)


def split(x: Any, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Views of consecutive parts along `dim`: of the given sizes, or of one size (the last may be smaller)."""
    shape, sizes = x.shape, split_size_or_sections
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"split: dim {dim} of an array with {len(shape)} dims, shape {shape}")
    n = shape[dim]
    if not isinstance(sizes, int | list | tuple):
        raise ShapeError(f"split: the sizes are {sizes!r}, expected one integer or a list of them")
    if isinstance(sizes, int):
        if sizes <= 0:
            raise ShapeError(f"split: parts of size {sizes}; the size must be positive")
        sizes = [min(sizes, n - start) for start in range(0, n, sizes)] or [0]
    if sum(sizes) != n or any(size < 0 for size in sizes):
        raise ShapeError(f"split: sizes {tuple(sizes)} do not add up to dim {dim} of shape {shape}")
    return Split.apply(x, sizes=tuple(sizes), dim=dim % len(shape))


def pad(x: Any, pad: Sequence[Any], mode: str = "constant", value: float | None = None) -> Tensor:
    """`x` with more around it, or less where a width is negative: one pair (before, after) for each dim of x.

    Or PyTorch's way: one flat list of integers, two for the last dim, two for the one before, and so on, for as many dims as it
    names. `mode` says what is put there: "constant", `value` (0 by default); "reflect", the values inside, mirrored at the first
    and the last, which are not repeated; "replicate", the first and the last; "circular", those of the other end. ShapeError
    where the widths do not fit x, or there is not enough to reflect.
    """
    pairs = _width_pairs(x, pad)
    if mode != "constant":
        if value is not None:
            raise ShapeError(f'pad: value is {value}, which mode "{mode}" does not use; leave it out')
        from mpitrain.ops.padding import padded_from_itself
        return padded_from_itself(x, pairs, mode)
    return Pad.apply(x, widths=pairs, value=0.0 if value is None else value)


def _width_pairs(x: Any, widths: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """One pair for each dim of x."""
    shape, given = tuple(x.shape), list(widths)
    try:
        if not all(isinstance(entry, Sequence) for entry in given):
            flat = [operator.index(n) for n in given]
            if len(flat) % 2 or len(flat) > 2 * len(shape):
                raise ShapeError(f"pad: {len(flat)} widths for the {len(shape)} dims of shape {shape}; expected two for each "
                                 "dim, from the last on")
            named = list(zip(flat[::2], flat[1::2]))[::-1]
            return (*[(0, 0)] * (len(shape) - len(named)), *named)
        pairs = tuple((operator.index(before), operator.index(after)) for before, after in given)
    except (TypeError, ValueError):
        raise ShapeError(f"pad: widths {widths!r}, expected a pair of integers for each dim, or a flat list of them") from None
    if len(pairs) != len(shape):
        raise ShapeError(f"pad: {len(pairs)} pairs of widths for the {len(shape)} dims of shape {shape}")
    return pairs


def _numbers(given: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given
