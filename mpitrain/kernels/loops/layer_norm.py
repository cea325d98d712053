"""Layer and RMS norm of rows as in native/layer_norm.c: sums over a row in LANES partial sums, what a first guess of the mean is
wrong by corrects it, and sums over rows are kept in the arrays' type for SOME rows and then added to those in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.backend.namespace import Array
from mpitrain.kernels.dropout import Dropping
from mpitrain.kernels.loops import dropout as drops
from mpitrain.kernels.loops.mathematics import choose, u
from mpitrain.kernels.loops.rows import LANES, folded, total_of
from mpitrain.kernels.loops.typed import loop

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


@loop("x x x y y y d i i")
def _row_norm(x: Any, weight: Any, bias: Any, y: Any, means: Any, inverses: Any, eps: float, n: int, centred: int) -> None:
    lanes, more, real = np.empty(LANES, x.dtype), np.empty(LANES, x.dtype), x.dtype.type
    count, one, zero = real(n), real(1), real(0)
    for r in range(means.size):
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


def row_norm(x: Array, added: Array | None, weight: Array, bias: Array | None, eps: float, centred: bool,
             dropping: Dropping | None = None) -> tuple[Array, Array, Array, Array, Array | None]:
    total, bits = np.ascontiguousarray(x), None
    if added is not None and dropping is not None:
        samples = len(dropping.rows), x.size // max(len(dropping.rows), 1)
        total, bits = drops.dropout(added.reshape(samples), dropping.rows, dropping.key, dropping.p, total.reshape(samples),
                                    dropping.first(samples[1]))
        total = total.reshape(x.shape)
    elif added is not None:
        total = total + added
    y, (means, inverses) = np.empty(x.shape, x.dtype), np.empty((2, len(x)), x.dtype)
    shift = total.reshape(-1)[:0] if bias is None else np.ascontiguousarray(bias)
    _row_norm(total, np.ascontiguousarray(weight), shift, y, means, inverses, eps, x.shape[1], centred)
    return y, total, means, inverses, bits


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


@loop("x x x x x x y y y i i")
def _gradients(grad: Any, x: Any, weight: Any, around: Any, means: Any, inverses: Any, dx: Any, by_weight: Any, by_bias: Any,
               n: int, centred: int) -> None:
    lanes, more, real = np.empty(LANES, x.dtype), np.empty(LANES, x.dtype), x.dtype.type
    some, plain, product = np.zeros((2, n), x.dtype), np.zeros(n), np.zeros(n)
    count, zero = real(n), real(0)
    for r in range(means.size):
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
            if r % SOME == SOME - 1 or r == means.size - 1:
                for i in range(n):
                    product[i] += some[0, i]
                    plain[i] += some[1, i]
                some[:] = 0
    for i in range(by_weight.size):
        by_weight[i] = product[i]
        by_bias[i] = plain[i]


def row_norm_gradients(grad: Array, x: Array, weight: Array, around: Array | None, means: Array, inverses: Array, centred: bool,
                       wanted: tuple[bool, bool], bits: Array | None = None, p: float = 0.0
                       ) -> tuple[Array | None, Array | None, Array | None, Array | None]:
    none, width = np.empty(0, x.dtype), x.shape[1]
    dx = np.empty(x.shape, x.dtype) if wanted[0] else None
    product, plain = (np.empty(width, x.dtype), np.empty(width, x.dtype)) if wanted[1] else (None, None)
    _gradients(np.ascontiguousarray(grad), np.ascontiguousarray(x), np.ascontiguousarray(weight),
               none if around is None else np.ascontiguousarray(around), means, inverses, none if dx is None else dx,
               none if product is None else product, none if plain is None else plain, width, centred)
    dropped = None
    if dx is not None and bits is not None:
        dropped = drops.dropout_grad(dx.reshape(len(bits), dx.size // len(bits)), bits, p).reshape(dx.shape)
    return dx, product, plain, dropped
