"""Matrix products. Letters: `I` inputs, `O` outputs of a linear layer."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.autograd.mode import mode
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels import linear as layers
from mpitrain.kernels.pointwise import ACTIVATIONS
from mpitrain.kernels.product import KINDS, add_product, on_device, product, products
from mpitrain.kernels.sums import sum_rows
from mpitrain.ops.activation import gradient_before
from mpitrain.ops.shape import swapaxes

__all__ = ["linear", "matmul"]

FUSED_ACTIVATIONS = frozenset(ACTIVATIONS)
"""The names of activations that `linear` takes."""


class MatMul(Function):
    """The product over the last dim of x and the last but one of y; leading dims broadcast."""

    half = "products"
    complex_inputs = "analytic"
    broadcasts = True

    @staticmethod
    def forward(ctx: Context, x: Array, y: Array, *, operands: str = "") -> Array:
        if x.ndim == 0 or y.ndim == 0 or x.shape[-1] != y.shape[-2 if y.ndim > 1 else 0]:
            raise ShapeError(f"matmul: shapes {x.shape} and {y.shape} do not fit")
        ctx.save(x, y)
        ctx.operands = operands
        if (mode.by_rows and type(x) is np.ndarray and y.ndim == 2 and x.ndim > 1 and not operands and True not in ctx.needs
                and x.dtype == y.dtype in KINDS):
            return _by_rows(_rows(x), y.T, None).reshape(*x.shape[:-1], y.shape[1])
        if y.ndim == 2 and x.ndim > 2:            # one product instead of one for each leading index
            return product(_rows(x), y, operands=operands).reshape(*x.shape[:-1], y.shape[1])
        if x.ndim == y.ndim == 2:
            return product(x, y, operands=operands)
        if x.ndim > 1 and y.ndim > 1:
            return products(x, y, operands)
        return ctx.xp.matmul(x, y)

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
                by_y = _product_for(ctx, 1, _rows(x).T, flat)
            return by_x, by_y
        left, right = x[None, :] if x.ndim == 1 else x, y[:, None] if y.ndim == 1 else y
        grad = grad[..., None] if y.ndim == 1 else grad
        grad = grad[..., None, :] if x.ndim == 1 else grad
        if 0 in grad.strides:                         # dims that repeat (a broadcast gradient), which BLAS would not take
            grad = xp.ascontiguousarray(grad)
        if ctx.needs[0]:
            by_x = products(grad, right.swapaxes(-1, -2), ctx.operands)
        if ctx.needs[1]:
            by_y = products(left.swapaxes(-1, -2), grad, ctx.operands)
            by_y = by_y[..., 0] if y.ndim == 1 else by_y
        return by_x, by_y

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        x, y = ctx.input(0), ctx.input(1)
        by_x = by_y = None
        if y.ndim == 2 and x.ndim > 1:
            if ctx.needs[0]:
                by_x = MatMul.apply(grad, y.transpose(), operands=ctx.operands)
            if ctx.needs[1]:
                by_y = MatMul.apply(_matrix(x).transpose(), _matrix(grad), operands=ctx.operands)
            return by_x, by_y
        left, right = x[None, :] if x.ndim == 1 else x, y[:, None] if y.ndim == 1 else y
        grad = grad[..., None] if y.ndim == 1 else grad
        grad = grad[..., None, :] if x.ndim == 1 else grad
        if ctx.needs[0]:
            by_x = matmul(grad, swapaxes(right, -1, -2))
        if ctx.needs[1]:
            by_y = matmul(swapaxes(left, -1, -2), grad)
            by_y = by_y[..., 0] if y.ndim == 1 else by_y
        return by_x, by_y


class Linear(Function):
    """a(x W' + b); the gradients of weight and bias are written where they will be sent from.

    The activation a is computed in the memory of the product, so that what comes before it is nowhere kept. In backward one
    pass makes the gradient of the product and the bias's, which is its sum over the rows. Where all its products are ours, one
    call of C does what forward has to do, and one what backward has.
    """

    half = "products"
    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array, bias: Array | None, *, activation: str | None,
                operands: str = "") -> Array:
        if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
            raise ShapeError(f"linear: an input of shape {x.shape} does not fit a weight of shape {weight.shape} "
                             "(outputs, inputs)")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ShapeError(f"linear: a bias of shape {bias.shape} does not fit a weight of shape {weight.shape}")
        rows = _rows(x)
        fused = None if activation is None else ACTIVATIONS[activation]
        if (mode.by_rows and type(rows) is np.ndarray and not operands and True not in ctx.needs
                and rows.dtype == weight.dtype in KINDS):
            made = _by_rows(rows, weight, bias)
            return (made if fused is None else fused.forward(made, ours=True, training=False)[0]).reshape(*x.shape[:-1],
                                                                                                          weight.shape[0])
        ctx.activation, ctx.name, ctx.operands, ctx.before = fused, activation, operands, None
        ctx.together = layers.suits(rows, weight, fused, operands)
        if ctx.together:
            given = rows, weight, bias, fused, True in ctx.needs
            made, kept = layers.linear(*given, operands) if operands else layers.linear(*given)
        else:
            made, kept = product(rows, weight.T, bias, operands=operands), None
            if fused is not None:
                made, kept = fused.forward(made, ours=True, training=True in ctx.needs)
        result = made.reshape(*x.shape[:-1], weight.shape[0])
        if fused is None:
            ctx.save(x, weight)
            return result
        # The result is the very array that is handed out, so that it is watched; the bias is for the derivative of a slope.
        ctx.save(x, weight, result) if kept is made else ctx.save(x, weight, kept, bias)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        x, weight, *kept = ctx.saved
        flat = _rows(grad)
        by_x = by_weight = by_bias = None
        if ctx.together:
            return Linear._together(ctx, x, weight, kept, flat)
        if kept:
            if ctx.before is None:                    # the second half of a split backward finds them made
                sums = room_for(ctx, 2, flat.shape[1:], flat.dtype) if ctx.wanted[2] else None
                ctx.before = ctx.activation.gradient(_rows(kept[0]), flat, sums), sums
            flat, by_bias = ctx.before
        elif ctx.needs[2]:
            by_bias = sum_rows(flat, ctx.out(2))
        if ctx.needs[0]:
            by_x = product(flat, weight, operands=ctx.operands).reshape(x.shape)
        if ctx.needs[1]:
            by_weight = _product_for(ctx, 1, flat.T, _rows(x))
        return by_x, by_weight, by_bias

    @staticmethod
    def _together(ctx: Context, x: Array, weight: Array, kept: list[Array], grad: Array) -> tuple[Any, ...]:
        """All gradients in one call; the second half of a split backward finds that of the product and the bias's made."""
        activation, before, sums = ctx.activation, _rows(kept[0]) if kept else None, None
        if ctx.before is not None:
            (grad, by_bias), activation, before = ctx.before, None, None
        else:
            by_bias = sums = room_for(ctx, 2, weight.shape[:1], grad.dtype) if ctx.wanted[2] else None
        so_far = ctx.so_far(1) if ctx.needs[1] and type(grad) is not np.ndarray else None
        by_weight = so_far if so_far is not None or not ctx.needs[1] else room_for(ctx, 1, weight.shape, grad.dtype)
        given = grad, before, _rows(x), weight, activation, sums, by_weight, ctx.needs[0]
        more = (so_far is not None, ctx.operands) if so_far is not None or ctx.operands else ()       # of a device alone
        made, by_x = layers.linear_gradients(*given, *more)
        ctx.before = made, by_bias
        return None if by_x is None else by_x.reshape(x.shape), by_weight, by_bias

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.input(0), ctx.input(1)
        if ctx.activation is not None:
            grad = gradient_before(ctx, ctx.name, grad, ctx.saved[2],
                                   lambda: linear(x, weight, ctx.input(2), operands=ctx.operands))
        return (MatMul.apply(grad, weight, operands=ctx.operands) if ctx.needs[0] else None,
                MatMul.apply(_matrix(grad).transpose(), _matrix(x), operands=ctx.operands) if ctx.needs[1] else None,
                _matrix(grad).sum(0) if ctx.needs[2] else None)


def _product_for(ctx: Context, place: int, x: Array, y: Array) -> Array:
    """x y as the gradient of an input: where it will be sent from, and on a device added to what is there already."""
    so_far = ctx.so_far(place) if type(x) is not np.ndarray and on_device(x, y) else None
    if so_far is not None:
        return add_product(x, y, so_far, ctx.operands)
    return product(x, y, out=ctx.out(place), operands=ctx.operands)


def _by_rows(x: Array, weight: Array, bias: Array | None) -> Array:
    from mpitrain.kernels.few_rows import row_by_row  # training does without
    return row_by_row(x, weight, bias)


def _matrix(x: Tensor) -> Tensor:
    """A matrix whose rows are the last dim of x."""
    return x if x.ndim == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])


def room_for(ctx: Context, place: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Memory for the gradient of an input: where it will be sent from, if that is free."""
    given = ctx.out(place)
    return ctx.xp.empty(shape, dtype) if given is None else given


def _rows(x: Array) -> Array:
    """A matrix whose rows are the last dim of x, in memory that BLAS takes: other strides fall to a plain loop."""
    rows = x.reshape(-1, x.shape[-1]) if x.size else x.reshape(prod(x.shape[:-1]), x.shape[-1])
    step = x.dtype.itemsize
    if rows.strides[1] == step and rows.strides[0] >= step * rows.shape[1]:
        return rows
    if rows.strides[0] == step and rows.strides[1] >= step * rows.shape[0]:
        return rows
    return rows.copy()


def operands_of(x: Any) -> str:
    """The format that products with x round their operands to."""
    return x.operands if isinstance(x, Tensor) else ""


def matmul(x: Any, y: Any) -> Tensor:
    """``x @ y``: batched, broadcast over leading dims, one-dimensional inputs as NumPy takes them."""
    return MatMul.apply(x, y, operands=operands_of(y) or operands_of(x))


def linear(x: Any, weight: Any, bias: Any = None, activation: str | None = None, *, operands: str | None = None) -> Tensor:
    """``activation(x @ weight.T + bias)`` for x (..., I), weight (O, I), bias (O,).

    `activation` is None or one of FUSED_ACTIVATIONS: "gelu", "gelu_tanh", "relu", "sigmoid", "silu", "tanh". `operands` is the
    format that the product rounds what it multiplies to, "" for none (default: the weight's).
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ShapeError(f'linear: activation is None or one of {", ".join(sorted(ACTIVATIONS))}, not "{activation}"')
    return Linear.apply(x, weight, bias, activation=activation, operands=operands_of(weight) if operands is None else operands)
