"""Losses. Each is the SUM over its terms, as a tensor with no dims: the trainer divides once, by the count over all
ranks, so that uneven batches stay exact. The counts are beside: `cross_entropy_count` and `element_count`.
"""

from __future__ import annotations

from sys import getrefcount
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor, stand_in
from mpitrain.autograd.accumulate import ONE, is_private
from mpitrain.backend import Array
from mpitrain.errors import ConfigError, DataError, ShapeError
from mpitrain.kernels import pointwise, rows
from mpitrain.ops.activation import sigmoid, softmax
from mpitrain.ops.choice import signs, where
from mpitrain.ops.elementwise import log

__all__ = ["binary_cross_entropy_with_logits", "cross_entropy", "cross_entropy_count", "element_count", "huber",
           "kl_divergence", "l1", "mse"]


class CrossEntropy(Function):
    half = "loss"
    floats = 1

    @staticmethod
    def forward(ctx: Context, logits: Array, labels: Array, *, smoothing: float, ignore: int | None) -> Array:
        if logits.shape[:-1] != labels.shape or logits.ndim == 0 or labels.dtype.kind not in "iu":
            raise ShapeError(f"cross_entropy: logits of shape {logits.shape} want integer labels of shape "
                             f"{logits.shape[:-1]}, found {labels.dtype} of shape {labels.shape}")
        classes = logits.shape[-1]
        flat = ctx.xp.ascontiguousarray(labels, dtype=ctx.xp.int64).reshape(-1)
        if ctx.xp is np:                          # a device makes NaN of such a loss: it would have to be waited for
            check_labels(flat, classes, ignore, labels)
        x = logits.reshape(flat.size, classes)
        losses, kept, totals = rows.cross_entropy(x, flat, smoothing, ignore, ctx.needs[0])
        ctx.save(logits if kept is x else kept, flat, totals)      # a change of the logits is noticed where they are kept
        ctx.keeps_logits = kept is x
        ctx.shape, ctx.smoothing, ctx.ignore = logits.shape, smoothing, ignore
        return losses.sum()

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        kept, labels, totals = ctx.saved
        smoothing, ignore, shape = ctx.smoothing, ctx.ignore, ctx.shape
        own = not ctx.keeps_logits
        ctx.release()                             # the gradient is written over exponentials, or logits that nobody else has
        own = own or (getrefcount(kept) == ONE and is_private(kept, gaps=True))
        kept = kept.reshape(labels.size, shape[-1])
        return rows.cross_entropy_grad(kept, labels, totals, smoothing, ignore, grad, own).reshape(shape), None

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        kept, labels, totals = ctx.saved
        classes, xp = ctx.shape[-1], ctx.xp
        exps, totals = rows.exponentials(kept.reshape(len(labels), classes), totals)
        counted = xp.ones(len(labels), bool) if ctx.ignore is None else labels != ctx.ignore
        share = xp.where(counted[:, None], exps, 1) / xp.where(counted, totals, 1)[:, None]      # of ignored rows, anything
        log_p = xp.log(xp.maximum(share, xp.finfo(exps.dtype).tiny))
        p = softmax(stand_in(ctx, 0, log_p.reshape(ctx.shape)))       # a shift of the logits changes nothing
        wanted = xp.full(exps.shape, ctx.smoothing / classes, exps.dtype)
        wanted[xp.arange(len(labels)), xp.where(counted, labels, 0)] += 1 - ctx.smoothing
        return (p - wanted.reshape(ctx.shape)) * grad * counted.reshape(*ctx.shape[:-1], 1).astype(exps.dtype), None


class Distance(Function):
    """A sum over differences: its derivative is `ctx.factor` times what forward saved."""

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        slope, = ctx.saved
        by_prediction = slope * (ctx.factor * grad)
        return by_prediction, -by_prediction if ctx.needs[1] else None

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        slope, = ctx.saved
        difference = stand_in(ctx, 0, slope) - stand_in(ctx, 1, ctx.xp.zeros_like(slope))
        by_prediction = ctx.function.slope(ctx, slope, difference) * (ctx.factor * grad)
        return by_prediction, -by_prediction if ctx.needs[1] else None

    @staticmethod
    def slope(ctx: Context, known: Array, difference: Tensor) -> Tensor:
        """`known`, what was saved, as a function of the difference, whose values are the same."""
        return difference


class SquaredError(Distance):
    @staticmethod
    def forward(ctx: Context, prediction: Array, target: Array) -> Array:
        _same_shape("mse", prediction, target)
        difference = prediction - target
        ctx.save(difference)
        ctx.factor = 2
        return (difference * difference).sum()


class AbsoluteError(Distance):
    @staticmethod
    def forward(ctx: Context, prediction: Array, target: Array) -> Array:
        _same_shape("l1", prediction, target)
        difference = prediction - target
        ctx.save(signs(difference))
        ctx.factor = 1
        return ctx.xp.abs(difference).sum()

    @staticmethod
    def slope(ctx: Context, known: Array, difference: Tensor) -> Tensor:
        return Tensor(known)                          # the sign


class Huber(Distance):
    """Half the square up to delta, a straight line from there; Huber, 1964."""

    @staticmethod
    def forward(ctx: Context, prediction: Array, target: Array, *, delta: float) -> Array:
        _same_shape("huber", prediction, target)
        difference = prediction - target
        limited = ctx.xp.clip(difference, -delta, delta)
        ctx.save(limited)
        ctx.factor, ctx.delta = 1, delta
        difference -= limited / 2
        difference *= limited                     # d^2/2 inside, delta (|d| - delta/2) outside
        return difference.sum()

    @staticmethod
    def slope(ctx: Context, known: Array, difference: Tensor) -> Tensor:
        return where(ctx.xp.abs(known) < ctx.delta, difference, known)


class BinaryCrossEntropy(Function):
    """-t log s(x) - (1 - t) log(1 - s(x)) = max(x, 0) - x t + log(1 + exp(-|x|)), s the sigmoid."""

    @staticmethod
    def forward(ctx: Context, logits: Array, targets: Array) -> Array:
        xp = ctx.xp
        _same_shape("binary_cross_entropy_with_logits", logits, targets)
        ctx.save(logits, targets)
        return (xp.maximum(logits, logits.dtype.type(0)) - logits * targets + xp.log1p(xp.exp(-xp.abs(logits)))).sum()

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        logits, targets = ctx.saved
        by_logits = None
        if ctx.needs[0]:
            by_logits = pointwise.sigmoid(logits)
            by_logits -= targets
            by_logits *= grad
        return by_logits, -logits * grad if ctx.needs[1] else None

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        logits, targets = ctx.input(0), ctx.input(1)
        return ((sigmoid(logits) - targets) * grad if ctx.needs[0] else None,
                -logits * grad if ctx.needs[1] else None)


class KLDivergence(Function):
    """p (log p - log q), 0 where p = 0."""

    @staticmethod
    def forward(ctx: Context, log_q: Array, p: Array) -> Array:
        _same_shape("kl_divergence", log_q, p)
        xp = ctx.xp
        zero = p == 0
        distance = xp.where(zero, 0, xp.log(xp.where(zero, 1, p).astype(p.dtype)) - log_q)
        ctx.save(p, distance, zero)
        return (p * distance).sum()

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Any, ...]:
        p, distance, zero = ctx.saved
        return -p * grad, (distance + ~zero) * grad if ctx.needs[1] else None

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        p, (values, distance, zero) = ctx.input(1), ctx.saved
        log_q = stand_in(ctx, 0, ctx.xp.where(zero, 0, ctx.xp.log(ctx.xp.where(zero, 1, values)) - distance).astype(values.dtype))
        by_p = None
        if ctx.needs[1]:
            by_p = where(zero, distance, log(where(zero, grad.dtype.type(1), p)) - log_q + 1) * grad
        return -p * grad, by_p


def _same_shape(name: str, x: Array, y: Array) -> None:
    """Broadcasting (N,) against (N, 1) would give N * N terms without a word."""
    if x.shape != y.shape:
        raise ShapeError(f"{name}: shapes {x.shape} and {y.shape} differ; they must be equal")


def check_labels(flat: Array, classes: int, ignore: int | None, labels: Array) -> None:
    wrong = (flat < 0) | (flat >= classes)
    if ignore is not None:
        wrong &= flat != ignore
    if wrong.any():
        place = int(wrong.argmax())
        raise DataError(f"label {int(flat[place])} is not in 0 ... {classes - 1}: the model has {classes} classes",
                        row=place // (flat.size // len(labels)) if labels.ndim else 0)


def cross_entropy(input: Any, target: Any, *, label_smoothing: float = 0.0, ignore_index: int | None = None) -> Tensor:
    """-log softmax(input)[target], summed; logits `input` (..., C), integer `target` (...).

    `label_smoothing` s mixes the label's distribution with the uniform one, s/C each. Labels equal to `ignore_index`
    count for nothing. Raises DataError (row, value) for other labels outside 0 ... C-1; on a device, the loss is NaN then.
    """
    return CrossEntropy.apply(input, target, smoothing=label_smoothing, ignore=ignore_index)


def cross_entropy_count(labels: Any, *, ignore_index: int | None = None) -> int:
    """The number of terms that `cross_entropy` sums: the labels, less the ignored ones."""
    labels = labels.array if isinstance(labels, Tensor) else labels
    return int(labels.size if ignore_index is None else (labels != ignore_index).sum())


def element_count(prediction: Any) -> int:
    """The number of terms that the other losses sum."""
    return int(prediction.size)


def mse(prediction: Any, target: Any) -> Tensor:
    """Squared differences, summed; equal shapes."""
    return SquaredError.apply(prediction, target)


def l1(prediction: Any, target: Any) -> Tensor:
    """Absolute differences, summed; equal shapes."""
    return AbsoluteError.apply(prediction, target)


def huber(prediction: Any, target: Any, delta: float = 1.0) -> Tensor:
    """Half of squared differences up to `delta`, linear beyond, summed; equal shapes."""
    if not delta > 0:
        raise ConfigError(f"huber: delta is {delta}, expected more than 0")
    return Huber.apply(prediction, target, delta=delta)


def binary_cross_entropy_with_logits(input: Any, target: Any) -> Tensor:
    """Summed over all elements; `target` holds floats in 0 ... 1, `input` logits of its shape."""
    return BinaryCrossEntropy.apply(input, target)


def kl_divergence(log_q: Any, p: Any) -> Tensor:
    """sum p (log p - log q), given log q and p: how far q is from p."""
    return KLDivergence.apply(log_q, p)
