# mypy: disable-error-code="no-any-return"
# (Function.apply gives one tensor, or a tuple of them.)
"""Matrix products. Letters: `I` inputs, `O` outputs of a linear layer."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels.product import product


class MatMul(Function):
    """The product over the last dim of x and the last but one of y; leading dims broadcast."""

    broadcasts = True

    @staticmethod
    def forward(ctx: Context, x: Array, y: Array, *, operands: str = "") -> Array:
        if x.ndim == 0 or y.ndim == 0 or x.shape[-1] != y.shape[-2 if y.ndim > 1 else 0]:
            raise ShapeError(f"matmul: shapes {x.shape} and {y.shape} do not fit")
        ctx.save(x, y)
        ctx.operands = operands
        if y.ndim == 2 and x.ndim > 2:            # one product instead of one for each leading index
            return product(_rows(x), y, operands=operands).reshape(*x.shape[:-1], y.shape[1])
        return product(x, y, operands=operands) if x.ndim == y.ndim == 2 else ctx.xp.matmul(x, y)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        x, y = ctx.saved
        xp = ctx.xp
        by_x = by_y = None
        if y.ndim == 2 and x.ndim > 1:
            flat = _rows(grad)
            if ctx.needs[0]:
                by_x = product(flat, y.T, operands=ctx.operands).reshape(x.shape)
            if ctx.needs[1]:
                by_y = product(_rows(x).T, flat, out=ctx.out(1), operands=ctx.operands)
            return by_x, by_y
        left, right = x[None, :] if x.ndim == 1 else x, y[:, None] if y.ndim == 1 else y
        grad = grad[..., None] if y.ndim == 1 else grad
        grad = _dense(xp, grad[..., None, :] if x.ndim == 1 else grad)
        if ctx.needs[0]:
            by_x = xp.matmul(grad, right.swapaxes(-1, -2))
        if ctx.needs[1]:
            by_y = xp.matmul(left.swapaxes(-1, -2), grad)
            by_y = by_y[..., 0] if y.ndim == 1 else by_y
        return by_x, by_y


class Linear(Function):
    """x W' + b; the gradients of weight and bias are written where they will be sent from."""

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array, bias: Array | None, *, operands: str = "") -> Array:
        if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
            raise ShapeError(f"linear: an input of shape {x.shape} does not fit a weight of shape {weight.shape} "
                             "(outputs, inputs)")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ShapeError(f"linear: a bias of shape {bias.shape} does not fit a weight of shape {weight.shape}")
        ctx.save(x, weight)
        ctx.operands = operands
        return product(_rows(x), weight.T, bias, operands=operands).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        x, weight = ctx.saved
        xp = ctx.xp
        flat = _rows(grad)
        by_x = by_weight = by_bias = None
        if ctx.needs[0]:
            by_x = product(flat, weight, operands=ctx.operands).reshape(x.shape)
        if ctx.needs[1]:
            by_weight = product(flat.T, _rows(x), out=ctx.out(1), operands=ctx.operands)
        if ctx.needs[2]:
            by_bias = xp.sum(flat, axis=0, out=ctx.out(2))
        return by_x, by_weight, by_bias


def _rows(x: Array) -> Array:
    """A matrix whose rows are the last dim of x, in memory that BLAS takes: other strides fall to a plain loop."""
    rows = x.reshape(-1, x.shape[-1]) if x.size else x.reshape(_product(x.shape[:-1]), x.shape[-1])
    step = x.dtype.itemsize
    if rows.strides[1] == step and rows.strides[0] >= step * rows.shape[1]:
        return rows
    if rows.strides[0] == step and rows.strides[1] >= step * rows.shape[0]:
        return rows
    return rows.copy()


def _dense(xp: Any, x: Array) -> Array:
    """A copy where dims repeat (a broadcast gradient): BLAS would not take it."""
    return xp.ascontiguousarray(x) if 0 in x.strides else x


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _operands(x: Any) -> str:
    """The format that products with x round their operands to."""
    return x.operands if isinstance(x, Tensor) else ""


def matmul(x: Any, y: Any) -> Tensor:
    """``x @ y``: batched, broadcast over leading dims, one-dimensional inputs as NumPy takes them."""
    return MatMul.apply(x, y, operands=_operands(y) or _operands(x))


def linear(x: Any, weight: Any, bias: Any = None) -> Tensor:
    """``x @ weight.T + bias`` for x (..., I), weight (O, I), bias (O,)."""
    return Linear.apply(x, weight, bias, operands=_operands(weight))
