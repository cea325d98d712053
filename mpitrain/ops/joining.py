"""Arrays joined and cut: stacks, chunks, grids of coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations as chosen
from itertools import combinations_with_replacement
from math import prod
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.index import take
from mpitrain.ops.inputs import as_tensor, dim_of, integers
from mpitrain.ops.shape import broadcast_to, concatenate, reshape, split, stack

__all__ = ["atleast_1d", "atleast_2d", "atleast_3d", "broadcast_shapes", "broadcast_tensors", "cartesian_prod", "chunk",
           "column_stack", "combinations", "dsplit", "dstack", "hsplit", "hstack", "meshgrid", "tensor_split", "unbind", "vsplit",
           "vstack"]


def _several(name: str, tensors: Any) -> list[Tensor]:
    found = [as_tensor(x) for x in tensors]
    if not found:
        raise ShapeError(f"{name} wants at least one tensor, found none")
    return found


def _each(op: Any, tensors: tuple[Any, ...]) -> Any:
    """`op` of one tensor, or of each of several, or of a list of them."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], tuple | list) else tensors
    made = tuple(op(as_tensor(x)) for x in given)
    return made[0] if len(tensors) == 1 and given is tensors else made


def atleast_1d(*tensors: Any) -> Any:
    """Tensors with at least one dim."""
    return _each(lambda x: reshape(x, 1) if not x.ndim else x, tensors)


def atleast_2d(*tensors: Any) -> Any:
    """Tensors with at least two dims: new ones come first."""
    return _each(lambda x: reshape(x, (1,) * (2 - x.ndim) + x.shape) if x.ndim < 2 else x, tensors)


def atleast_3d(*tensors: Any) -> Any:
    """Tensors with at least three dims: (1, N, 1) of N values, (N, M, 1) of a matrix."""
    return _each(lambda x: x if x.ndim > 2 else reshape(x, (*((1,) * (2 - x.ndim) + x.shape), 1)), tensors)


def hstack(tensors: Sequence[Any]) -> Tensor:
    """Tensors joined along dim 1, vectors along dim 0."""
    parts = [atleast_1d(x) for x in _several("hstack", tensors)]
    return concatenate(parts, 0 if parts[0].ndim == 1 else 1)


def vstack(tensors: Sequence[Any]) -> Tensor:
    """Tensors joined along dim 0; vectors are rows."""
    return concatenate([atleast_2d(x) for x in _several("vstack", tensors)], 0)


def dstack(tensors: Sequence[Any]) -> Tensor:
    """Tensors joined along dim 2; see `atleast_3d`."""
    return concatenate([atleast_3d(x) for x in _several("dstack", tensors)], 2)


def column_stack(tensors: Sequence[Any]) -> Tensor:
    """Tensors joined along dim 1; vectors are columns."""
    return concatenate([reshape(x, (x.size, 1)) if x.ndim < 2 else x for x in _several("column_stack", tensors)], 1)


class Unbind(Function):
    half = "own"
    complex_inputs = "analytic"
    views = True

    @staticmethod
    def forward(ctx: Context, x: Array, *, dim: int) -> tuple[Array, ...]:
        ctx.dim, before = dim, (slice(None),) * dim
        return tuple([x[(*before, i, ...)] for i in range(x.shape[dim])])

    @staticmethod
    def backward(ctx: Context, *grads: Array) -> Array:
        return ctx.xp.stack(grads, axis=ctx.dim)

    @staticmethod
    def derivative(ctx: Context, *grads: Tensor) -> Tensor:
        return stack(grads, ctx.dim)


def unbind(x: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """The slices of x along `dim`, which is gone in each."""
    x = as_tensor(x)
    if not x.ndim:
        raise ShapeError("unbind: the input has no dims, expected one or more")
    dim = dim_of("unbind", x, dim)
    if not x.shape[dim]:
        return ()
    return Unbind.apply(x, dim=dim)


def chunk(x: Any, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """At most so many parts along `dim`, of one size but for the last."""
    x = as_tensor(x)
    if chunks < 1 or not x.ndim:
        raise ShapeError(f"chunk: {chunks} parts of an array of shape {x.shape}; expected one or more, of one dim or more")
    size = x.shape[dim_of("chunk", x, dim)]
    return split(x, max(-(-size // chunks), 1), dim) if size else split(x, [0] * chunks, dim)


def tensor_split(x: Any, indices_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """So many parts along `dim`, as equal as can be, the first ones larger; or parts that end at these places."""
    x = as_tensor(x)
    if not x.ndim:
        raise ShapeError("tensor_split: the input has no dims, expected one or more")
    dim = dim_of("tensor_split", x, dim)
    if isinstance(indices_or_sections, Tensor):
        places = integers("tensor_split", indices_or_sections.array)
        indices_or_sections = int(places) if not places.ndim else [int(n) for n in places]
    n = x.shape[dim]
    if isinstance(indices_or_sections, int):
        if indices_or_sections < 1:
            raise ShapeError(f"tensor_split: {indices_or_sections} parts, expected one or more")
        each, rest = divmod(n, indices_or_sections)
        return split(x, [each + (i < rest) for i in range(indices_or_sections)], dim)
    if not isinstance(indices_or_sections, Sequence) or not all(isinstance(i, int | np.integer) for i in indices_or_sections):
        raise ShapeError(f"tensor_split: {indices_or_sections!r}, expected a number of parts, or the places where they end")
    edges = [slice(i).indices(n)[1] for i in indices_or_sections]
    starts, stops = [0, *edges], [*edges, n]
    before = (slice(None),) * dim
    return tuple(x[(*before, slice(a, max(a, b)))] for a, b in zip(starts, stops))


def _cut(name: str, x: Any, places: Any, dim: int) -> tuple[Tensor, ...]:
    x = as_tensor(x)
    if x.ndim <= dim:
        raise ShapeError(f"{name}: shape {x.shape}, expected {dim + 1} dims or more")
    if isinstance(places, int) and (places < 1 or x.shape[dim] % places):
        raise ShapeError(f"{name}: dim {dim} of shape {x.shape} cannot be cut into {places} equal parts; use tensor_split")
    return tensor_split(x, places, dim)


def hsplit(x: Any, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """Equal parts, or parts that end at these places, along dim 1; of vectors along dim 0."""
    return _cut("hsplit", x, indices_or_sections, 0 if len(x.shape) == 1 else 1)


def vsplit(x: Any, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """Equal parts, or parts that end at these places, along dim 0, of two dims or more."""
    if len(x.shape) < 2:
        raise ShapeError(f"vsplit: shape {tuple(x.shape)}, expected 2 dims or more")
    return _cut("vsplit", x, indices_or_sections, 0)


def dsplit(x: Any, indices_or_sections: Any) -> tuple[Tensor, ...]:
    """Equal parts, or parts that end at these places, along dim 2."""
    return _cut("dsplit", x, indices_or_sections, 2)


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that arrays of these shapes broadcast to."""
    wanted = [(s,) if isinstance(s, int) else tuple(s) for s in shapes]
    out = [1] * max(map(len, wanted), default=0)
    for shape in wanted:
        for place in range(1, len(shape) + 1):
            if shape[-place] != 1:
                if out[-place] not in (1, shape[-place]):
                    raise ShapeError(f"broadcast: shapes {', '.join(map(str, wanted))} do not broadcast; dim {-place} must be "
                                     "equal or 1")
                out[-place] = shape[-place]
    return tuple(out)


def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """All of them in the shape that they broadcast to."""
    parts = [as_tensor(x) for x in tensors]
    shape = broadcast_shapes(*(x.shape for x in parts))
    return tuple(broadcast_to(x, shape) for x in parts)


def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Coordinates of a grid, of vectors: number i varies along dim i; "xy" swaps the first two dims."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], tuple | list) else tensors
    parts = [atleast_1d(x) for x in _several("meshgrid", given)]
    if any(x.ndim > 1 for x in parts) or indexing not in ("ij", "xy"):
        raise ShapeError(f'meshgrid: shapes {", ".join(str(x.shape) for x in parts)} and indexing {indexing!r}; expected '
                         'vectors, and "ij" or "xy"')
    dims = list(range(len(parts)))
    if indexing == "xy" and len(parts) > 1:
        dims[0], dims[1] = 1, 0
    shape = [0] * len(parts)
    for d, x in zip(dims, parts):
        shape[d] = x.size
    return tuple(broadcast_to(reshape(x, (-1,) + (1,) * (len(parts) - 1 - d)) if x.size else reshape(
        x, (0,) + (1,) * (len(parts) - 1 - d)), shape) for d, x in zip(dims, parts))


def cartesian_prod(*vectors: Any) -> Tensor:
    """(N, k): each row has one value of each of k vectors, the last one varies first; one vector stays as it is."""
    parts = _several("cartesian_prod", vectors)
    if any(x.ndim != 1 for x in parts):
        raise ShapeError(f"cartesian_prod: shapes {', '.join(str(x.shape) for x in parts)}, expected vectors")
    if len(parts) == 1:
        return parts[0]
    return stack([reshape(x, prod(x.shape)) for x in meshgrid(*parts)], 1)


def combinations(x: Any, r: int = 2, with_replacement: bool = False) -> Tensor:
    """(N, r): each row has another choice of r values of a vector, in their order."""
    x = as_tensor(x)
    if x.ndim != 1 or r < 0:
        raise ShapeError(f"combinations: {r} of an array of shape {x.shape}; expected 0 or more of a vector")
    rows = list((combinations_with_replacement if with_replacement else chosen)(range(x.size), r))
    if r == 0:
        return Tensor(x.xp.zeros(0, x.dtype))
    return take(x, x.xp.asarray(rows, dtype="int64").reshape(len(rows), r), 0)
