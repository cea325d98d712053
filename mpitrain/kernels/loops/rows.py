"""Softmax, cross-entropy and sums by index as in native/rows.c, with its partial sums in its order: the same bits, but for the
logarithm's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.kernels.loops.mathematics import choose, exp_of_negative, u

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


def softmax(x: Any, y: Any, rows: int, n: int) -> None:
    lanes = np.empty(LANES, x.dtype)
    for first in range(0, rows * n, max(n, 1)):
        exps(x, first, n, largest(x, first, n, lanes), y, first)
        scale = x.dtype.type(1) / total_of(y, first, n, lanes)
        for i in range(first, first + n):
            y[u(i)] *= scale


def softmax_grad(y: Any, grad: Any, dx: Any, rows: int, n: int) -> None:
    lanes = np.empty(LANES, y.dtype)
    for first in range(0, rows * n, max(n, 1)):
        mean = dot(y, grad, first, n, lanes)
        for i in range(first, first + n):
            dx[u(i)] = (grad[u(i)] - mean) * y[u(i)]


def log_softmax(x: Any, y: Any, rows: int, n: int) -> None:
    lanes = np.empty(LANES, x.dtype)
    for first in range(0, rows * n, max(n, 1)):
        top = largest(x, first, n, lanes)
        exps(x, first, n, top, y, first)
        rest = math.log(total_of(y, first, n, lanes))
        for i in range(first, first + n):
            y[u(i)] = (x[u(i)] - top) - rest


def log_softmax_grad(y: Any, grad: Any, dx: Any, rows: int, n: int) -> None:
    lanes = np.empty(LANES, y.dtype)
    for first in range(0, rows * n, max(n, 1)):
        total = total_of(grad, first, n, lanes)
        for i in range(first, first + n):
            dx[u(i)] = grad[u(i)] - exp_of_negative(y[u(i)]) * total


def cross_entropy(x: Any, labels: Any, losses: Any, made: Any, totals: Any, smoothing: float, ignoring: int, ignored: int,
                  rows: int, n: int) -> int:
    lanes, real, keeps = np.empty(LANES, x.dtype), x.dtype.type, totals.size > 0
    row = np.empty(0 if keeps else n, x.dtype)
    for r in range(rows):
        label, first = labels[r], r * n
        if ignoring and label == ignored:
            losses[r] = 0
            continue
        if label < 0 or label >= n:
            return 2
        top = largest(x, first, n, lanes)
        if keeps:
            exps(x, first, n, top, made, first)
            total = total_of(made, first, n, lanes)
            totals[r] = total
        else:
            exps(x, first, n, top, row, 0)
            total = total_of(row, 0, n, lanes)
        loss = math.log(total) - real(1 - smoothing) * (x[first + label] - top)
        if smoothing != 0:
            loss -= real(smoothing) * (total_above(x, top, first, n, lanes) / real(n))
        losses[r] = loss
    return 0


def cross_entropy_grad(made: Any, labels: Any, totals: Any, smoothing: float, scale: float, ignoring: int, ignored: int,
                       rows: int, n: int) -> int:
    real = made.dtype.type
    factor = real(scale)
    uniform = real(smoothing / n) * factor
    for r in range(rows):
        label, first = labels[r], r * n
        if ignoring and label == ignored:
            made[first:first + n] = 0
            continue
        if label < 0 or label >= n:
            return 2
        share = factor / totals[r]
        for i in range(first, first + n):
            made[u(i)] = made[u(i)] * share - uniform
        made[first + label] -= real(1 - smoothing) * factor
    return 0


def scatter_add_rows(out: Any, indices: Any, values: Any, rows: int, n: int, outputs: int) -> int:
    for r in range(rows):
        if indices[r] < 0 or indices[r] >= outputs:
            return 2
    for r in range(rows):
        to, first = indices[r] * n, r * n
        for i in range(n):
            out[u(to + i)] += values[u(first + i)]
    return 0
