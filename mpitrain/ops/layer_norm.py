"""Layer and RMS normalisation over the last dims, and a residual sum with the norm of it in one pass over memory."""

from __future__ import annotations

from math import prod
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels.layer_norm import row_norm, row_norm_gradients


def layer_norm(x: Any, weight: Any, bias: Any = None, *, eps: float = 1e-5) -> Tensor:
    """Normalises x over its last dims, those of weight (and bias)."""
    _check("layer_norm", x, weight, bias)
    result: Tensor = RowNorm.apply(x, weight, bias, eps=eps, centred=True)
    return result


def rms_norm(x: Any, weight: Any, *, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dims, those of weight: no mean is subtracted.

    Zhang, Sennrich: "Root mean square layer normalization", 2019.
    """
    _check("rms_norm", x, weight, None)
    result: Tensor = RowNorm.apply(x, weight, None, eps=eps, centred=False)
    return result


def add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any = None, *, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """(residual + x, layer_norm of that); x and residual have one shape.

    Backward adds the gradient of the sum to what comes back through the norm in the same pass.
    """
    _check("add_layer_norm", x, weight, bias)
    if tuple(residual.shape) != tuple(x.shape):
        raise ShapeError(f"add_layer_norm: the residual has shape {tuple(residual.shape)}, the input {tuple(x.shape)}: not equal")
    total, result = AddRowNorm.apply(residual, x, weight, bias, eps=eps)
    return total, result


class RowNorm(Function):
    """Statistics of each row, a row being the last dims of x, those of weight: layer norm, and RMS norm if not centred."""

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array, bias: Array | None, *, eps: float, centred: bool) -> Array:
        y, _, means, inverses = row_norm(_rows(x, weight), None, weight.reshape(-1), _flat(bias), eps, centred)
        ctx.save(x, weight, means, inverses)
        ctx.centred = centred
        return y.reshape(x.shape)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, ...]:
        return _gradients(ctx, grad, None, ctx.needs[0], ctx.centred)


class AddRowNorm(Function):
    """The sum of two arrays and the layer norm of its rows."""

    @staticmethod
    def forward(ctx: Context, residual: Array, x: Array, weight: Array, bias: Array | None, *,
                eps: float) -> tuple[Array, Array]:
        y, total, means, inverses = row_norm(_rows(residual, weight), _rows(x, weight), weight.reshape(-1), _flat(bias), eps,
                                             True)
        total = total.reshape(x.shape)
        ctx.save(total, weight, means, inverses)
        return total, y.reshape(x.shape)

    @staticmethod
    def backward(ctx: Context, around: Array, grad: Array) -> tuple[Array | None, ...]:
        dx, *others = _gradients(ctx, grad, around, ctx.needs[0] or ctx.needs[1], True)
        return dx if ctx.needs[0] else None, dx if ctx.needs[1] else None, *others


def _gradients(ctx: Context, grad: Array, around: Array | None, needed: bool, centred: bool) -> tuple[Array | None, ...]:
    """Those of x, where `needed`, of weight and of bias, the last two inputs."""
    x, weight, means, inverses = ctx.saved
    needs_weight, needs_bias = ctx.needs[-2:]
    beside = None if around is None else _rows(around, weight)
    dx, product, plain = row_norm_gradients(_rows(grad, weight), _rows(x, weight), weight.reshape(-1), beside, means, inverses,
                                            centred, (needed, needs_weight or needs_bias))
    return (dx.reshape(x.shape) if needed else None,
            product.astype(x.dtype).reshape(weight.shape) if needs_weight else None,
            plain.astype(x.dtype).reshape(weight.shape) if needs_bias else None)


def _rows(x: Array, weight: Array) -> Array:
    """x as (R, D), D the values that weight has."""
    return x.reshape(prod(x.shape[:x.ndim - weight.ndim]), weight.size)


def _flat(values: Array | None) -> Array | None:
    return None if values is None else values.reshape(-1)


def _check(name: str, x: Any, weight: Any, bias: Any) -> None:
    shape = tuple(weight.shape)
    if not shape or tuple(x.shape)[-len(shape):] != shape:
        raise ShapeError(f"{name}: the weight has shape {shape}, the input {tuple(x.shape)} must end with it")
    if bias is not None and tuple(bias.shape) != shape:
        raise ShapeError(f"{name}: the bias has shape {tuple(bias.shape)}, the weight {shape}")
