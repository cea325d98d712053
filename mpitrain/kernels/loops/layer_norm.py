"""Layer and RMS norm of rows as in native/layer_norm.c: sums over a row in LANES partial sums, what a first guess of the mean is
wrong by corrects it, and sums over rows are kept in the arrays' type for SOME rows and then added to those in float64. The room
for these, `sums` and `part`, is C's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.kernels.loops.dropout import dropout, dropout_grad
from mpitrain.kernels.loops.mathematics import choose, u
from mpitrain.kernels.loops.rows import LANES, folded, total_of

SOME = 16


@register_jitable
def distances(x: Any, first: int, n: int, guess: Any, squares: Any, drift: Any) -> None:
    """Adds (x - guess)^2 and x - guess to lanes."""
    squares[:] = 0
    drift[:] = 0
    whole = n - n % LANES
    for i in range(first, first + whole, LANES):
        for k in range(LANES):
            d = x[u(i + k)] - guess
            squares[k] += d * d
            drift[k] += d
    for k in range(n - whole):
        d = x[u(first + whole + k)] - guess
        squares[k] += d * d
        drift[k] += d


@register_jitable
def normalised(x: Any, weight: Any, bias: Any, y: Any, means: Any, inverses: Any, eps: float, rows: int, n: int,
               centred: int) -> None:
    lanes, more, real = np.empty(LANES, x.dtype), np.empty(LANES, x.dtype), x.dtype.type
    count, one, zero = real(n), real(1), real(0)
    for r in range(rows):
        first = r * n
        mean = total_of(x, first, n, lanes) / count if centred else zero
        distances(x, first, n, mean, lanes, more)
        square = folded(lanes)
        if centred:
            wrong = folded(more) / count
            mean += wrong
            square -= wrong * wrong * count
        square = choose(square < 0, zero, square)
        inverse = one / math.sqrt(square / count + real(eps))
        means[r] = mean
        inverses[r] = inverse
        if bias.size:
            for i in range(n):
                y[u(first + i)] = (x[u(first + i)] - mean) * inverse * weight[i] + bias[i]
        else:
            for i in range(n):
                y[u(first + i)] = (x[u(first + i)] - mean) * inverse * weight[i]


def row_norm(x: Any, added: Any, total: Any, weight: Any, bias: Any, y: Any, means: Any, inverses: Any, eps: float, rows: int,
             n: int, centred: int, samples: Any, bits: Any, key: int, least: int, parts: int, scale: float) -> None:
    if not added.size:
        normalised(x, weight, bias, y, means, inverses, eps, rows, n, centred)
        return
    if samples.size:
        dropout(added, samples, x, total, bits, key, least, scale, rows // parts, parts * n)
    else:
        for i in range(rows * n):
            total[i] = x[i] + added[i]
    normalised(total, weight, bias, y, means, inverses, eps, rows, n, centred)


@register_jitable
def slopes(grad: Any, x: Any, weight: Any, first: int, n: int, mean: Any, sums: Any, products: Any) -> None:
    """Adds grad * weight, and its products with x - mean, to lanes."""
    sums[:] = 0
    products[:] = 0
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        for k in range(LANES):
            h = grad[u(first + i + k)] * weight[u(i + k)]
            sums[k] += h
            products[k] += h * (x[u(first + i + k)] - mean)
    for k in range(n - whole):
        h = grad[u(first + whole + k)] * weight[u(whole + k)]
        sums[k] += h
        products[k] += h * (x[u(first + whole + k)] - mean)


def row_norm_gradients(grad: Any, x: Any, weight: Any, around: Any, means: Any, inverses: Any, dx: Any, by_weight: Any,
                       by_bias: Any, sums: Any, part: Any, rows: int, n: int, centred: int, bits: Any, dropped: Any,
                       scale: float) -> None:
    lanes, more, real = np.empty(LANES, x.dtype), np.empty(LANES, x.dtype), x.dtype.type
    some, plain, product = np.zeros((2, n), x.dtype), np.zeros(n), np.zeros(n)
    count, zero = real(n), real(0)
    for r in range(rows):
        first, mean, inverse = r * n, means[r], inverses[r]
        if dx.size:
            slopes(grad, x, weight, first, n, mean, lanes, more)
            constant = -folded(lanes) / count * inverse if centred else zero
            slope = -(folded(more) * inverse) / count * inverse
            for i in range(n):
                z = (x[u(first + i)] - mean) * inverse
                dx[u(first + i)] = grad[u(first + i)] * weight[i] * inverse + (z * slope + constant)
            if around.size:
                for i in range(first, first + n):
                    dx[u(i)] += around[u(i)]
        if by_weight.size:
            for i in range(n):
                some[0, i] += grad[u(first + i)] * ((x[u(first + i)] - mean) * inverse)
                some[1, i] += grad[u(first + i)]
            if r % SOME == SOME - 1 or r == rows - 1:
                for i in range(n):
                    product[i] += some[0, i]
                    plain[i] += some[1, i]
                some[:] = 0
    for i in range(by_weight.size):
        by_weight[i] = product[i]
        by_bias[i] = plain[i]
    if bits.size:
        dropout_grad(dx, bits, dropped, scale, 1, rows * n)
