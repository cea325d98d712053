"""Batch and group norm by channel of x (N, C, L), as in native/batch_norm.c: sums over a channel are kept in LANES numbers of the
arrays' type, and added to as many of float64 after at most SPAN numbers. A channel is read again while the cache has it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.kernels.loops.mathematics import choose, u
from mpitrain.kernels.loops.rows import folded
from mpitrain.kernels.loops.tile import add_products

LANES, SPAN, FEW = 64, 1024, 16


@register_jitable
def emptied(some: Any, all_: Any) -> None:
    """Adds lanes of the arrays' type to those of float64."""
    for k in range(LANES):
        all_[k] += some[k]
    some[:] = 0


@register_jitable
def room(count: int, left: int, a: Any, b: Any, all_a: Any, all_b: Any) -> Any:
    """(how many numbers go in now, how many are in then)."""
    n = min(left, SPAN)
    if count + n > SPAN:
        emptied(a, all_a)
        emptied(b, all_b)
        count = 0
    return n, count + n


@register_jitable
def moments_about(x: Any, centre: Any, samples: int, channels: int, size: int, j: int, a: Any, b: Any, all_a: Any,
                  all_b: Any) -> Any:
    """The sums of d and d * d over channel j, d = x - centre."""
    a[:], b[:], all_a[:], all_b[:], count = 0, 0, 0, 0, 0
    for sample in range(samples):
        first, stop = (sample * channels + j) * size, (sample * channels + j + 1) * size
        while first < stop:
            n, count = room(count, stop - first, a, b, all_a, all_b)
            whole = n - n % LANES
            for i in range(first, first + whole, LANES):
                for k in range(LANES):
                    d = x[u(i + k)] - centre
                    a[k] += d
                    b[k] += d * d
            for k in range(n - whole):
                d = x[u(first + whole + k)] - centre
                a[k] += d
                b[k] += d * d
            first += n
    emptied(a, all_a)
    emptied(b, all_b)
    return folded(all_a), folded(all_b)


@register_jitable
def moments(x: Any, samples: int, channels: int, size: int, j: int, a: Any, b: Any, all_a: Any, all_b: Any) -> Any:
    """(mean, sum of squared distances from it) of channel j, from distances from the mean of a few numbers; anew where that is
    far from the mean."""
    total, few, count = 0.0, min(size, FEW) if samples else 0, max(samples * size, 1)
    for i in range(few):
        total += x[j * size + i]
    centre = x.dtype.type(total / few) if few else x.dtype.type(0)
    for _ in range(2):
        plain, square = moments_about(x, centre, samples, channels, size, j, a, b, all_a, all_b)
        off = plain / count
        square -= plain * off
        mean = centre + off
        if not off * off * count > 4 * square:
            break
        centre = x.dtype.type(mean)
    return mean, choose(square < 0.0, 0.0, square)


def channel_moments(x: Any, mean: Any, squares: Any, samples: int, channels: int, size: int) -> None:
    a, b, all_a, all_b = np.empty(LANES, x.dtype), np.empty(LANES, x.dtype), np.empty(LANES), np.empty(LANES)
    for j in range(channels):
        mean[j], squares[j] = moments(x, samples, channels, size, j, a, b, all_a, all_b)


def channel_affine(x: Any, centre: Any, scale: Any, shift: Any, y: Any, samples: int, channels: int, size: int) -> None:
    for run in range(samples * channels):
        m, s, b = centre[run % channels], scale[run % channels], shift[run % channels]
        for i in range(run * size, (run + 1) * size):
            y[u(i)] = (x[u(i)] - m) * s + b


def channel_combine(grad: Any, x: Any, centre: Any, a: Any, b: Any, d: Any, out: Any, samples: int, channels: int,
                    size: int) -> None:
    for run in range(samples * channels):
        j = run % channels
        m, aj, bj, dj = centre[j], a[j], b[j], d[j]
        for i in range(run * size, (run + 1) * size):
            out[u(i)] = aj * grad[u(i)] + bj * (x[u(i)] - m) + dj


@register_jitable
def add_gradients(x: Any, made: Any, at: int, first: int, n: int, m: Any, a: Any, b: Any) -> None:
    """Adds what `made` has of the gradient, and its products with x - m."""
    whole = n - n % LANES
    if whole:
        add_products(a, b, x, first, m, made, at, whole)
    for k in range(n - whole):
        h = made[u(at + whole + k)]
        a[k] += h
        b[k] += h * (x[u(first + whole + k)] - m)


@register_jitable
def gated(grad: Any, x: Any, y: Any, first: int, n: int, m: Any, s: Any, shift: Any, masked: int, made: Any, at: int) -> None:
    """made[at : at + n] = grad, but 0 where ReLU made 0: where y <= 0 (masked 1), or (x - m) s + shift, which y was (2)."""
    zero = grad.dtype.type(0)
    if masked == 1:
        for i in range(n):
            made[u(at + i)] = choose(y[u(first + i)] <= 0, zero, grad[u(first + i)])
    else:
        for i in range(n):
            made[u(at + i)] = choose((x[u(first + i)] - m) * s + shift <= 0, zero, grad[u(first + i)])


@register_jitable
def sums_of(grad: Any, x: Any, y: Any, h: Any, samples: int, channels: int, size: int, j: int, m: Any, s: Any, shift: Any,
            masked: int, made: Any, a: Any, b: Any, all_a: Any, all_b: Any) -> Any:
    """The sums over channel j of what ReLU passes of grad, which h keeps where it has room, and of its products with x - m."""
    a[:], b[:], all_a[:], all_b[:], count = 0, 0, 0, 0, 0
    for sample in range(samples):
        first, stop = (sample * channels + j) * size, (sample * channels + j + 1) * size
        while first < stop:
            n, count = room(count, stop - first, a, b, all_a, all_b)
            if masked == 0:
                add_gradients(x, grad, first, first, n, m, a, b)
            elif masked == 1:
                gated(grad, x, y, first, n, m, s, shift, masked, h, first)
                add_gradients(x, h, first, first, n, m, a, b)
            else:
                gated(grad, x, y, first, n, m, s, shift, masked, made, 0)
                add_gradients(x, made, 0, first, n, m, a, b)
            first += n
    emptied(a, all_a)
    emptied(b, all_b)
    return folded(all_a), folded(all_b)


def channel_sums(grad: Any, x: Any, centre: Any, plain: Any, product: Any, samples: int, channels: int, size: int) -> None:
    a, b, all_a, all_b = np.empty(LANES, x.dtype), np.empty(LANES, x.dtype), np.empty(LANES), np.empty(LANES)
    made, none, zero = np.empty(SPAN, x.dtype), np.empty(0, x.dtype), x.dtype.type(0)
    for j in range(channels):
        plain[j], product[j] = sums_of(grad, x, none, none, samples, channels, size, j, centre[j], zero, zero, 0, made, a, b,
                                       all_a, all_b)


def batch_norm(x: Any, weight: Any, bias: Any, residual: Any, y: Any, mean: Any, variance: Any, inverse: Any, eps: float,
                samples: int, channels: int, size: int, relu: int) -> None:
    a, b, all_a, all_b = np.empty(LANES, x.dtype), np.empty(LANES, x.dtype), np.empty(LANES), np.empty(LANES)
    real = x.dtype.type
    zero = real(0)
    for j in range(channels):
        middle, squares = moments(x, samples, channels, size, j, a, b, all_a, all_b)
        mean[j], variance[j] = middle, squares / max(samples * size, 1)
        inverse[j] = 1 / math.sqrt(variance[j] + eps)
        m, s, shift = real(middle), real(inverse[j] * weight[j] if weight.size else inverse[j]), bias[j] if bias.size else zero
        for sample in range(samples):
            first = (sample * channels + j) * size
            if residual.size:
                for i in range(first, first + size):
                    y[u(i)] = (x[u(i)] - m) * s + shift + residual[u(i)]
            else:
                for i in range(first, first + size):
                    y[u(i)] = (x[u(i)] - m) * s + shift
            if relu:
                for i in range(first, first + size):
                    y[u(i)] = choose(y[u(i)] < 0, zero, y[u(i)])


def batch_norm_gradients(grad: Any, x: Any, y: Any, centre: Any, weight: Any, bias: Any, inverse: Any, dx: Any, h: Any,
                         plain: Any, product: Any, samples: int, channels: int, size: int, masked: int) -> None:
    a, b, all_a, all_b = np.empty(LANES, x.dtype), np.empty(LANES, x.dtype), np.empty(LANES), np.empty(LANES)
    made, real, count = np.empty(SPAN, x.dtype), x.dtype.type, max(samples * size, 1)
    for j in range(channels):
        m, s = centre[j], real(inverse[j] * weight[j] if weight.size else inverse[j])
        shift = bias[j] if bias.size else real(0)
        plain[j], product[j] = sums_of(grad, x, y, h, samples, channels, size, j, m, s, shift, masked, made, a, b, all_a, all_b)
        if dx.size:
            slope = real(-s * inverse[j] * inverse[j] * (product[j] / count))
            constant = real(-s * (plain[j] / count))
            for sample in range(samples):
                first = (sample * channels + j) * size
                if masked == 2:
                    for i in range(first, first + size):
                        z = x[u(i)] - m
                        dx[u(i)] = s * choose(z * s + shift <= 0, real(0), grad[u(i)]) + slope * z + constant
                elif masked == 1:
                    for i in range(first, first + size):
                        dx[u(i)] = s * h[u(i)] + slope * (x[u(i)] - m) + constant
                else:
                    for i in range(first, first + size):
                        dx[u(i)] = s * grad[u(i)] + slope * (x[u(i)] - m) + constant
