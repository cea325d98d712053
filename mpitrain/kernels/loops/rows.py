"""Softmax, cross-entropy and sums by index as in native/rows.c, with its partial sums in its order: the same bits, but for the
logarithm's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.backend.namespace import Array
from mpitrain.kernels.loops.mathematics import choose, exp_of_negative, u
from mpitrain.kernels.loops.typed import loop

LANES = 32


@register_jitable
def folded(lanes: Any) -> Any:
    """The sum of all lanes, a power of two of them, in halves."""
    step = lanes.size // 2
    while step > 0:
        for i in range(step):
            lanes[i] += lanes[u(i + step)]
        step //= 2
    return lanes[0]


@register_jitable
def total_of(x: Any, first: int, n: int, lanes: Any) -> Any:
    """The sum of x[first : first + n]."""
    lanes[:] = 0
    whole = n - n % LANES
    for i in range(first, first + whole, LANES):
        for k in range(LANES):
            lanes[k] += x[u(i + k)]
    for k in range(n - whole):
        lanes[k] += x[u(first + whole + k)]
    return folded(lanes)


@register_jitable
def total_above(x: Any, top: Any, first: int, n: int, lanes: Any) -> Any:
    """The sum of x - top."""
    lanes[:] = 0
    whole = n - n % LANES
    for i in range(first, first + whole, LANES):
        for k in range(LANES):
            lanes[k] += x[u(i + k)] - top
    for k in range(n - whole):
        lanes[k] += x[u(first + whole + k)] - top
    return folded(lanes)


@register_jitable
def dot(x: Any, y: Any, first: int, n: int, lanes: Any) -> Any:
    """The sum of products of these."""
    lanes[:] = 0
    whole = n - n % LANES
    for i in range(first, first + whole, LANES):
        for k in range(LANES):
            lanes[k] += x[u(i + k)] * y[u(i + k)]
    for k in range(n - whole):
        lanes[k] += x[u(first + whole + k)] * y[u(first + whole + k)]
    return folded(lanes)


@register_jitable
def largest(x: Any, first: int, n: int, lanes: Any) -> Any:
    """NaN is passed over."""
    lanes[:] = -np.inf
    whole = n - n % LANES
    for i in range(first, first + whole, LANES):
        for k in range(LANES):
            lanes[k] = choose(x[u(i + k)] > lanes[k], x[u(i + k)], lanes[k])
    for k in range(n - whole):
        lanes[k] = choose(x[u(first + whole + k)] > lanes[k], x[u(first + whole + k)], lanes[k])
    step = LANES // 2
    while step > 0:
        for k in range(step):
            lanes[k] = choose(lanes[u(k + step)] > lanes[k], lanes[u(k + step)], lanes[k])
        step //= 2
    return lanes[0]


@register_jitable
def exps(x: Any, first: int, n: int, top: Any, made: Any, to: int) -> None:
    """made[to : to + n] = exp(x - top), where no x is above top."""
    for i in range(n):
        made[u(to + i)] = exp_of_negative(x[u(first + i)] - top)


@loop("x y i i")
def _softmax(x: Any, y: Any, rows: int, n: int) -> None:
    lanes = np.empty(LANES, x.dtype)
    for first in range(0, rows * n, max(n, 1)):
        exps(x, first, n, largest(x, first, n, lanes), y, first)
        scale = x.dtype.type(1) / total_of(y, first, n, lanes)
        for i in range(first, first + n):
            y[u(i)] *= scale


@loop("x x y i i")
def _softmax_grad(y: Any, grad: Any, dx: Any, rows: int, n: int) -> None:
    lanes = np.empty(LANES, y.dtype)
    for first in range(0, rows * n, max(n, 1)):
        mean = dot(y, grad, first, n, lanes)
        for i in range(first, first + n):
            dx[u(i)] = (grad[u(i)] - mean) * y[u(i)]


@loop("x y i i")
def _log_softmax(x: Any, y: Any, rows: int, n: int) -> None:
    lanes = np.empty(LANES, x.dtype)
    for first in range(0, rows * n, max(n, 1)):
        top = largest(x, first, n, lanes)
        exps(x, first, n, top, y, first)
        rest = math.log(total_of(y, first, n, lanes))
        for i in range(first, first + n):
            y[u(i)] = (x[u(i)] - top) - rest


@loop("x x y i i")
def _log_softmax_grad(y: Any, grad: Any, dx: Any, rows: int, n: int) -> None:
    lanes = np.empty(LANES, y.dtype)
    for first in range(0, rows * n, max(n, 1)):
        total = total_of(grad, first, n, lanes)
        for i in range(first, first + n):
            dx[u(i)] = grad[u(i)] - exp_of_negative(y[u(i)]) * total


def _of_rows(run: Any) -> Any:
    def call(first: Array, *others: Array) -> Array:
        first = np.ascontiguousarray(first)
        result = np.empty_like(first)
        run(first, *[np.ascontiguousarray(array) for array in others], result, *first.shape)
        return result
    return call


softmax, softmax_grad, log_softmax, log_softmax_grad = map(_of_rows, (_softmax, _softmax_grad, _log_softmax, _log_softmax_grad))


@loop("x int64 y y y d i i i")
def _cross_entropy(x: Any, labels: Any, losses: Any, made: Any, totals: Any, smoothing: float, ignoring: int, ignored: int,
                   n: int) -> None:
    lanes, real, keeps = np.empty(LANES, x.dtype), x.dtype.type, totals.size > 0
    for r in range(labels.size):
        if ignoring and labels[r] == ignored:
            losses[r] = 0
            continue
        first = r * n
        to = first if keeps else 0
        top = largest(x, first, n, lanes)
        exps(x, first, n, top, made, to)
        total = total_of(made, to, n, lanes)
        if keeps:
            totals[r] = total
        loss = math.log(total) - real(1 - smoothing) * (x[first + labels[r]] - top)
        if smoothing != 0:
            loss -= real(smoothing) * (total_above(x, top, first, n, lanes) / real(n))
        losses[r] = loss


def cross_entropy(logits: Array, labels: Array, smoothing: float, ignore: int | None,
                  training: bool) -> tuple[Array, Array, Array]:
    logits = np.ascontiguousarray(logits)
    rows, n = logits.shape
    kept = rows if training else 0
    losses, made, totals = np.empty(rows, logits.dtype), np.empty((kept or 1, n), logits.dtype), np.empty(kept, logits.dtype)
    _cross_entropy(logits, np.ascontiguousarray(labels), losses, made, totals, smoothing, ignore is not None, ignore or 0, n)
    return losses, made[:kept], totals


@loop("y int64 x d d i i i")
def _cross_entropy_grad(made: Any, labels: Any, totals: Any, smoothing: float, scale: float, ignoring: int, ignored: int,
                        n: int) -> None:
    real = made.dtype.type
    factor = real(scale)
    uniform = real(smoothing / n) * factor
    for r in range(labels.size):
        first = r * n
        if ignoring and labels[r] == ignored:
            made[first:first + n] = 0
            continue
        share = factor / totals[r]
        for i in range(first, first + n):
            made[u(i)] = made[u(i)] * share - uniform
        made[first + labels[r]] -= real(1 - smoothing) * factor


def cross_entropy_grad(made: Array, labels: Array, totals: Array, smoothing: float, ignore: int | None, grad: Array) -> Array:
    _cross_entropy_grad(made, np.ascontiguousarray(labels), totals, smoothing, float(grad), ignore is not None, ignore or 0,
                        made.shape[1])
    return made


@loop("y int64 x i")
def _scatter(out: Any, indices: Any, values: Any, n: int) -> None:
    for r in range(indices.size):
        to, first = indices[r] * n, r * n
        for i in range(n):
            out[u(to + i)] += values[u(first + i)]


def scatter_add_rows(out: Array, indices: Array, values: Array) -> Array:
    assert values.shape == (indices.size, out.shape[1]) and values.dtype == out.dtype
    if not out.flags.c_contiguous:
        np.add.at(out, indices, values)
    else:
        _scatter(out, np.ascontiguousarray(indices, dtype=np.int64), np.ascontiguousarray(values), out.shape[1])
    return out
