"""Dropout, with masks that are functions of (seed, step, global sample, layer): no rank, no order of calls matters."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.backend.random import current
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.kernels import dropout as kernels

__all__ = ["dropout"]


def dropout(x: Any, p: float, layer: str, residual: Any = None, *, part: int = 0,
            positions: Array | None = None) -> Tensor:
    """Sets each element of x (B, ...) to 0 with probability p and divides the others by 1 - p; adds `residual`, of x's shape.

    B is the batch, or a multiple of it. The mask is drawn from the current random scope under the name `layer`; each use
    of a name within a step draws another one. Where x holds a part of each sample, of parts of one size, `part` is its number:
    what is dropped is that part of what would be dropped of the whole. Where x (B, L, ...) holds some positions of each sample,
    `positions` says which. Srivastava et al.: "Dropout", 2014.
    """
    if not 0 <= p < 1:
        raise ConfigError(f"dropout: p is {p}, expected at least 0 and less than 1")
    if not len(x.shape):
        raise ShapeError("dropout: the input has no dims, expected (B, ...)")
    if residual is not None and tuple(residual.shape) != tuple(x.shape):
        raise ShapeError(f"dropout: the residual has shape {tuple(residual.shape)}, the input {tuple(x.shape)}: not equal")
    if positions is not None and (len(x.shape) < 2 or x.shape[1] != len(positions)):
        raise ShapeError(f"dropout: {len(positions)} positions, the input has shape {tuple(x.shape)}: dim 1 is not as long")
    return Dropout.apply(x, residual, p=p, key=current().key(layer), part=part, positions=positions)


def pieces(x: Array, positions: Array, xp: Any) -> tuple[Array, Array]:
    """(rows in a stream of random words, places of their first words), both (B * L,), of x (B, L, ...) at `positions`."""
    scope, width = current(), prod(x.shape[2:])
    key = len(x), width, positions.tobytes() if isinstance(positions, np.ndarray) else None, xp
    found: tuple[Array, Array] | None = scope.kept.get(key)
    if found is None:
        places = xp.asarray(positions, dtype=xp.uint64) * xp.uint64(width)
        found = xp.repeat(scope.rows(len(x), xp), len(positions)), xp.tile(places, len(x))
        if scope.samples is not None and key[2] is not None:
            scope.kept[key] = found
    return found


class Dropout(Function):
    """x * keep / (1 - p) [+ residual]; the mask is kept as bits."""

    half = "own"
    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, residual: Array | None, *, p: float, key: Any, part: int,
                positions: Array | None) -> Array:
        rows, first = (current().rows(len(x), ctx.xp), part * (x.size // max(len(x), 1))) if positions is None else pieces(
            x, positions, ctx.xp)
        flat = _flat(x, len(rows))
        y, bits = kernels.dropout(flat, rows, key, p, None if residual is None else _flat(residual, len(rows)), first)
        ctx.save(bits)
        ctx.p = p
        return y.reshape(x.shape)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, Array]:
        bits, = ctx.saved
        return kernels.dropout_grad(_flat(grad, len(bits)), bits, ctx.p).reshape(grad.shape) if ctx.needs[0] else None, grad

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return Dropped.apply(grad, bits=ctx.saved[0], p=ctx.p) if ctx.needs[0] else None, grad


class Dropped(Function):
    """x with what dropout dropped, by its bits: linear, and its own adjoint."""

    half = "own"
    floats = 1

    @staticmethod
    def forward(ctx: Context, x: Array, *, bits: Array, p: float) -> Array:
        ctx.bits, ctx.p = bits, p
        return kernels.dropout_grad(_flat(x, len(bits)), bits, p).reshape(x.shape)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Dropped.apply(grad, bits=ctx.bits, p=ctx.p)


def _flat(x: Array, rows: int) -> Array:
    return x.reshape(rows, x.size // max(rows, 1))
