"""Rotary position embeddings. Letters: `L` length, `D` width, `R` the part of the width that turns."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import array_module
from mpitrain.errors import ShapeError
from mpitrain.ops.elementwise import add, multiply
from mpitrain.ops.index import getitem
from mpitrain.ops.shape import concatenate, reshape, stack

__all__ = ["rotary_embedding"]


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
    angles = places[..., None].astype("float64") * base ** (-np.arange(half) / max(half, 1))
    xp = array_module(x.array if isinstance(x, Tensor) else x)
    cos, sin = (xp.asarray(f(angles).astype(x.dtype)) for f in (np.cos, np.sin))
    if interleaved:
        pairs = reshape(getitem(x, (..., slice(0, turning))), *shape[:-1], half, 2)
        a, b = getitem(pairs, (..., 0)), getitem(pairs, (..., 1))
        turned = [reshape(stack(_turn(a, b, cos, sin), dim=-1), *shape[:-1], turning)]
    else:
        turned = _turn(getitem(x, (..., slice(0, half))), getitem(x, (..., slice(half, turning))), cos, sin)
    rest = [getitem(x, (..., slice(turning, None)))] if turning < shape[-1] else []
    return concatenate([*turned, *rest], dim=-1)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to)))


def _turn(a: Tensor, b: Tensor, cos: Any, sin: Any) -> list[Tensor]:
    return [multiply(a, cos) - multiply(b, sin), add(multiply(b, cos), multiply(a, sin))]
