"""Dropout, with masks that are functions of (seed, step, global sample, layer): no rank, no order of calls matters."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.backend.random import current
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.kernels import dropout as kernels


def dropout(x: Any, p: float, layer: str, residual: Any = None, *, part: int = 0) -> Tensor:
    """Sets each element of x (B, ...) to 0 with probability p and divides the others by 1 - p; adds `residual`, of x's shape.

    B is the batch, or a multiple of it. The mask is drawn from the current random scope under the name `layer`; each use
    of a name within a step draws another one. Where x holds a part of each sample, of parts of one size, `part` is its number:
    what is dropped is that part of what would be dropped of the whole. Srivastava et al.: "Dropout", 2014.
    """
    if not 0 <= p < 1:
        raise ConfigError(f"dropout: p is {p}, expected at least 0 and less than 1")
    if not len(x.shape):
        raise ShapeError("dropout: the input has no dims, expected (B, ...)")
    if residual is not None and tuple(residual.shape) != tuple(x.shape):
        raise ShapeError(f"dropout: the residual has shape {tuple(residual.shape)}, the input {tuple(x.shape)}: not equal")
    result: Tensor = Dropout.apply(x, residual, p=p, key=current().key(layer), part=part)
    return result


class Dropout(Function):
    """x * keep / (1 - p) [+ residual]; the mask is kept as bits."""

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, residual: Array | None, *, p: float, key: int, part: int) -> Array:
        rows, flat = current().rows(len(x), ctx.xp), _flat(x)
        y, bits = kernels.dropout(flat, rows, key, p, None if residual is None else _flat(residual), part * flat.shape[1])
        ctx.save(bits)
        ctx.p = p
        return y.reshape(x.shape)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, Array]:
        bits, = ctx.saved
        return kernels.dropout_grad(_flat(grad), bits, ctx.p).reshape(grad.shape) if ctx.needs[0] else None, grad


def _flat(x: Array) -> Array:
    return x.reshape(len(x), x.size // max(len(x), 1))
