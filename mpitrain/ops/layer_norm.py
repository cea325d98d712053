"""Layer and RMS normalisation over the last dims, and a residual sum with the norm of it in one pass over memory."""

from __future__ import annotations

from math import prod
from typing import Any

from mpitrain.autograd import Context, Function, Tensor, differentiate
from mpitrain.backend import Array
from mpitrain.backend.random import current
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.kernels.dropout import Dropping
from mpitrain.kernels.layer_norm import row_norm, row_norm_gradients
from mpitrain.ops.composed import normalised
from mpitrain.ops.dropout import Dropped, pieces
from mpitrain.ops.dropout import dropout as drop

__all__ = ["add_layer_norm", "layer_norm", "rms_norm"]


def layer_norm(x: Any, weight: Any, bias: Any = None, *, eps: float = 1e-5) -> Tensor:
    """Normalises x over its last dims, those of weight (and bias)."""
    _check("layer_norm", x, weight, bias)
    return RowNorm.apply(x, weight, bias, eps=eps, centred=True)


def rms_norm(x: Any, weight: Any, *, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dims, those of weight: no mean is subtracted.

    Zhang, Sennrich: "Root mean square layer normalization", 2019.
    """
    _check("rms_norm", x, weight, None)
    return RowNorm.apply(x, weight, None, eps=eps, centred=False)


def add_layer_norm(x: Any, residual: Any, weight: Any, bias: Any = None, *, eps: float = 1e-5, dropout: float = 0.0,
                   layer: str = "", part: int = 0, positions: Array | None = None) -> tuple[Tensor, Tensor]:
    """(residual + dropout of x, layer_norm of that); x and residual have one shape, (B, ...) where something is dropped.

    What is dropped, with probability `dropout`, is what `ops.dropout` with this `layer`, `part` and `positions` drops. Backward
    adds the gradient of the sum to what comes back through the norm in the same pass.
    """
    _check("add_layer_norm", x, weight, bias)
    if tuple(residual.shape) != tuple(x.shape):
        raise ShapeError(f"add_layer_norm: the residual has shape {tuple(residual.shape)}, the input {tuple(x.shape)}: not equal")
    if not 0 <= dropout < 1:
        raise ConfigError(f"add_layer_norm: dropout is {dropout}, expected at least 0 and less than 1")
    if dropout and (len(x.shape) <= len(weight.shape) + (positions is not None) or prod(weight.shape) % 8):
        # rows that fill no whole bytes of the mask, or are no samples
        total = drop(x, dropout, layer, residual, part=part, positions=positions)
        return total, layer_norm(total, weight, bias, eps=eps)
    key = current().key(layer) if dropout else 0
    total, result = AddRowNorm.apply(residual, x, weight, bias, eps=eps, dropout=dropout, key=key, part=part,
                                      positions=positions)
    return total, result


class RowNorm(Function):
    """Statistics of each row, a row being the last dims of x, those of weight: layer norm, and RMS norm if not centred."""

    half = "parameters"
    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array, bias: Array | None, *, eps: float, centred: bool) -> Array:
        y, _, means, inverses, _ = row_norm(_rows(x, weight), None, _flat(weight), _flat(bias), eps, centred)
        ctx.save(x, weight, means, inverses)
        ctx.centred, ctx.eps = centred, eps
        return _as(y, x)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, ...]:
        dx, _, *others = _gradients(ctx, grad, None, ctx.needs[0], ctx.centred)
        return dx, *others

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return _derivatives(ctx, ctx.input(0), ctx.input(1), grad, ctx.needs[0], ctx.centred)


class AddRowNorm(Function):
    """The sum of two arrays and the layer norm of its rows."""

    half = "parameters"
    floats = 4

    @staticmethod
    def forward(ctx: Context, residual: Array, x: Array, weight: Array, bias: Array | None, *, eps: float, dropout: float,
                key: Any, part: int, positions: Array | None) -> tuple[Array, Array]:
        dropping = None
        if dropout and x.size:
            rows, firsts = (current().rows(len(x), ctx.xp), None) if positions is None else pieces(x, positions, ctx.xp)
            dropping = Dropping(rows, key, dropout, part, firsts)
        y, total, means, inverses, bits = row_norm(_rows(residual, weight), _rows(x, weight), _flat(weight), _flat(bias),
                                                   eps, True, dropping)
        total = total.reshape(x.shape)
        ctx.save(total, weight, means, inverses, bits)
        ctx.p, ctx.eps = dropout, eps
        return total, y.reshape(x.shape)

    @staticmethod
    def backward(ctx: Context, around: Array, grad: Array) -> tuple[Array | None, ...]:
        bits = ctx.saved[-1]
        dx, dropped, *others = _gradients(ctx, grad, around, ctx.needs[0] or ctx.needs[1], True, bits, ctx.p)
        return dx if ctx.needs[0] else None, (dx if bits is None else dropped) if ctx.needs[1] else None, *others

    @staticmethod
    def derivative(ctx: Context, around: Tensor, grad: Tensor) -> tuple[Any, ...]:
        bits = ctx.saved[-1]
        by_total, *others = _derivatives(ctx, ctx.output(), ctx.input(2), grad, ctx.needs[0] or ctx.needs[1], True)
        dx = around if by_total is None else around + by_total
        dropped = dx if bits is None else Dropped.apply(dx, bits=bits, p=ctx.p)
        return dx if ctx.needs[0] else None, dropped if ctx.needs[1] else None, *others


def _gradients(ctx: Context, grad: Array, around: Array | None, needed: bool, centred: bool, bits: Array | None = None,
               p: float = 0.0) -> tuple[Array | None, ...]:
    """The gradients of x, where `needed`, of the input of dropout, of weight and of bias, the last two inputs."""
    x, weight, means, inverses = ctx.saved[:4]
    needs_weight, needs_bias = ctx.needs[-2:]
    beside = None if around is None else _rows(around, weight)
    place = len(ctx.needs) - 2
    outs = ctx.out(place) if needs_weight else None, ctx.out(place + 1) if needs_bias else None
    dx, product, plain, dropped = row_norm_gradients(
        _rows(grad, weight), _rows(x, weight), _flat(weight), beside, means, inverses, centred,
        (needed, needs_weight or needs_bias), bits, p, (_flat(outs[0]), _flat(outs[1])))
    if centred and weight.size == 1 and around is None and needed:
        dx[...] = 0                               # a number alone is its own mean: what the loops leave is rounding
    return (_as(dx, x) if needed else None,
            None if dropped is None else _as(dropped, x),
            outs[0] if outs[0] is not None else _as(product, weight) if needs_weight else None,
            outs[1] if outs[1] is not None else _as(plain, weight) if needs_bias else None)


def _derivatives(ctx: Context, x: Tensor, weight: Tensor, grad: Tensor, needed: bool, centred: bool) -> tuple[Any, ...]:
    """The gradients of x, of weight and of bias, the last two inputs, as tensors."""
    def normalise(x: Tensor, weight: Tensor) -> Tensor:
        return normalised(x, tuple(range(x.ndim - weight.ndim, x.ndim)), ctx.eps, centred=centred) * weight

    needs_weight, needs_bias = ctx.needs[-2:]
    return (*differentiate(normalise, [x, weight], [grad], (needed, needs_weight)),
            grad.sum(tuple(range(x.ndim - weight.ndim))) if needs_bias else None)


def _rows(x: Array, weight: Array) -> Array:
    """x as (R, D), D the values that weight has."""
    if x.ndim == 2 and weight.ndim == 1:          # a call less, here and below: those of an op are a third of its time
        return x
    return x.reshape(prod(x.shape[:x.ndim - weight.ndim]), weight.size)


def _as(values: Array, like: Array) -> Array:
    return values if values.shape == like.shape else values.reshape(like.shape)


def _flat(values: Any) -> Any:
    return values if values is None or values.ndim == 1 else values.reshape(-1)


def _check(name: str, x: Any, weight: Any, bias: Any) -> None:
    if not hasattr(weight, "shape"):
        raise ShapeError(f"{name}: the weight is {weight!r}, expected an array of the dims that are normalised, in place "
                         f"of PyTorch's normalized_shape: ops.{name}(x, ops.ones({weight!r})) has no weights")
    shape = tuple(weight.shape)
    if not shape or tuple(x.shape)[-len(shape):] != shape:
        raise ShapeError(f"{name}: the weight has shape {shape}, the input {tuple(x.shape)} must end with it")
    if bias is not None and tuple(bias.shape) != shape:
        raise ShapeError(f"{name}: the bias has shape {tuple(bias.shape)}, the weight {shape}")
