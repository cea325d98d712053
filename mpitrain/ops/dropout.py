"""Dropout, with masks that are functions of (seed, step, global sample, layer): no rank, no order of calls matters."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.backend.random import current
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.kernels.random import random_words


def dropout(x: Any, p: float, layer: str) -> Tensor:
    """Sets each element of x (B, ...) to 0 with probability p and divides the others by 1 - p.

    B is the batch, or a multiple of it. The mask is drawn from the current random scope under the name `layer`; each use
    of a name within a step draws another one. Srivastava et al.: "Dropout", 2014.
    """
    if not 0 <= p < 1:
        raise ConfigError(f"dropout: p is {p}, expected at least 0 and less than 1")
    if not len(x.shape):
        raise ShapeError("dropout: the input has no dims, expected (B, ...)")
    result: Tensor = Dropout.apply(x, p=p, key=current().key(layer))
    return result


class Dropout(Function):
    """x * keep / (1 - p)."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, p: float, key: int) -> Array:
        rows = current().rows(len(x), ctx.xp)
        words = random_words(rows, key, x.size // max(len(x), 1))
        keep = (words >= round(p * (1 << 32))).reshape(x.shape)      # a word is below p * 2^32 with probability p
        ctx.save(keep)
        ctx.scale = x.dtype.type(1 / (1 - p))
        return _masked(x, keep, ctx.scale, ctx.xp)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        keep, = ctx.saved
        return _masked(grad, keep, ctx.scale, ctx.xp)


def _masked(x: Array, keep: Array, scale: Any, xp: Any) -> Array:
    result = xp.where(keep, x, x.dtype.type(0))                      # not x * keep: NaN times 0 is NaN
    result *= scale
    return result
