"""Rotary position embeddings. Letters: `L` length, `D` width, `R` the part of the width that turns."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, array_module
from mpitrain.errors import ShapeError
from mpitrain.kernels import rotary as kernels
from mpitrain.ops.elementwise import add, multiply
from mpitrain.ops.index import getitem
from mpitrain.ops.shape import concatenate, reshape, stack

__all__ = ["rotary_embedding"]

FORMATS = ("float32", "float64", "bfloat16", "float16")
LASTING = 16                                      # positions whose angles stay on a device


def rotary_embedding(x: Any, positions: Any = None, *, base: float = 10000.0, width: int | None = None,
                     interleaved: bool = False) -> Tensor:
    """x (..., L, D) with pairs of numbers turned by the angle position x base^(-2i / R), for pair i of R / 2.

    `positions` (L,) are 0, 1, ... by default; of (..., L) each row of x has its own, by broadcasting. A pair is (i, i + R / 2),
    as in LLaMA, or with `interleaved` (2i, 2i + 1), as in the paper. `width` is R, D by default; what is beyond stays. Su et al.:
    "RoFormer", 2021. ShapeError where R is odd or larger than D, or there are not L positions.
    """
    shape = tuple(x.shape)
    if len(shape) < 2:
        raise ShapeError(f"rotary_embedding: the input has shape {shape}, expected (..., L, D)")
    turning = shape[-1] if width is None else width
    if turning % 2 or not 0 <= turning <= shape[-1]:
        raise ShapeError(f"rotary_embedding: {turning} numbers of {shape[-1]} turn in pairs; expected an even number of them, at "
                         f"most {shape[-1]}")
    places = np.arange(shape[-2]) if positions is None else np.asarray(positions)
    if not places.ndim or places.shape[-1] != shape[-2] or not _broadcasts(places.shape, shape[:-1]):
        raise ShapeError(f"rotary_embedding: positions of shape {places.shape} for an input of shape {shape}, expected "
                         f"({shape[-2]},)")
    half = turning // 2
    xp = array_module(x.array if isinstance(x, Tensor) else x)
    if xp is not np and x.dtype.name in FORMATS:              # in one pass over memory; on the host, operations that others know
        texts, between = _texts(places, shape)
        cosines, sines = _tables(texts, half, base, x.dtype, xp)
        return Rotary.apply(x, cosines=cosines, sines=sines, between=between, interleaved=interleaved)
    cos, sin = (xp.asarray(f(_angles(places, half, base)).astype(x.dtype)) for f in (np.cos, np.sin))
    if interleaved:
        pairs = reshape(getitem(x, (..., slice(0, turning))), *shape[:-1], half, 2)
        a, b = getitem(pairs, (..., 0)), getitem(pairs, (..., 1))
        turned = [reshape(stack(_turn(a, b, cos, sin), dim=-1), *shape[:-1], turning)]
    else:
        turned = _turn(getitem(x, (..., slice(0, half))), getitem(x, (..., slice(half, turning))), cos, sin)
    rest = [getitem(x, (..., slice(turning, None)))] if turning < shape[-1] else []
    return concatenate([*turned, *rest], dim=-1)


class Rotary(Function):
    """x (..., L, D) on a device, with its pairs turned by angles whose cosines and sines (T L, R / 2) are there."""

    floats = 1
    half = "own"

    @staticmethod
    def forward(ctx: Context, x: Array, *, cosines: Array, sines: Array, between: int, interleaved: bool,
                back: bool = False) -> Array:
        ctx.options = {"cosines": cosines, "sines": sines, "between": between, "interleaved": interleaved, "back": not back}
        rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
        return kernels.rotary(rows, cosines, sines, x.shape[-2], between, interleaved, back).reshape(x.shape)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Rotary.apply(grad, **ctx.options)              # turned back: the transposed of a rotation is its inverse


def _texts(places: Array, shape: tuple[int, ...]) -> tuple[Array, int]:
    """(positions (T, L), how many rows of L positions that follow each other have the same of these) for `places` (..., L), which
    broadcast to those of an array of this shape."""
    outer, lead = shape[:-2], (1,) * (len(shape) - 1 - places.ndim) + places.shape[:-1]
    own = [i for i, n in enumerate(lead) if n != 1]
    first, end = (own[0], own[-1] + 1) if own else (0, 0)
    if lead[first:end] != outer[first:end]:
        places, end = np.broadcast_to(places, shape[:-1]), len(outer)
    return places.reshape(-1, shape[-2]), prod(outer[end:]) if own else 1


_known: dict[tuple[Any, ...], tuple[Array, Array]] = {}


def _tables(places: Array, half: int, base: float, dtype: Any, xp: Any) -> tuple[Array, Array]:
    """Cosines and sines (T L, half) for positions (T, L) on the device. They stay there for the next layers and steps, unless
    each text has its own positions, or there are few: those of a text that is being written come once."""
    wide = "float32" if dtype.itemsize == 2 else dtype.name
    lasting = len(places) == 1 and places.size >= LASTING
    key = (places.tobytes(), places.dtype.str, half, base, wide, xp.__name__) if lasting else None
    found = None if key is None else _known.get(key)
    if found is None:
        angles = _angles(places.reshape(-1), half, base)
        found = xp.asarray(np.cos(angles).astype(wide)), xp.asarray(np.sin(angles).astype(wide))
        if key is not None:
            _known[key] = found
    return found


def _angles(places: Array, half: int, base: float) -> Array:
    made: Array = places[..., None].astype("float64") * base ** (-np.arange(half) / max(half, 1))
    return made


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to)))


def _turn(a: Tensor, b: Tensor, cos: Any, sin: Any) -> list[Tensor]:
    return [multiply(a, cos) - multiply(b, sin), add(multiply(b, cos), multiply(a, sin))]
