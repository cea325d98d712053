"""Batch and group norm by channel of x (N, C, L), as in native/batch_norm.c, to the same bits: sums over a channel are kept in
256 bytes of numbers of the arrays' type, and added to as many of float64 after at most SPAN numbers. A few channels at a time
are read, sample by sample, and then again, backwards, while the caches have them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.kernels.loops.mathematics import choose, u
from mpitrain.kernels.loops.pointwise import silu_both, silu_of
from mpitrain.kernels.loops.runs import (
    FAR,
    MOMENTS,
    NEAR,
    add_moments,
    add_passed,
    add_plain,
    add_residual,
    add_residual_relu,
    add_signed,
    add_signed6,
    add_signed_swish,
    normalise,
    normalise_hardswish,
    normalise_relu,
    normalise_relu6,
    sloped,
    sloped_signed,
    sloped_signed6,
    sloped_signed_swish,
)

SPAN, FEW = 1024, 16
SILU, SILU_BEFORE = 4, 5                          # `activation` and `masked`, which runs.py knows nothing of
LANES, BYTES = 64, 256                            # Room for the sums of a channel, and the bytes of those that there are.
TOGETHER, MOST_TOGETHER = 1 << 20, 32             # Bytes of x in the channels that are read again; how many those are at most.


@register_jitable
def together(x: Any, samples: int, channels: int, size: int) -> Any:
    """How many channels are done at a time."""
    return max(1, min(TOGETHER // x.itemsize // max(samples * size, 1), channels, MOST_TOGETHER))


@register_jitable
def ahead(j: int, first: int, last: int, channels: int, size: int) -> Any:
    """From run j of channels [first, last) to the one that comes NEAR numbers after it."""
    if size > FAR:
        return NEAR
    wide, place = last - first, j - first + max(NEAR // max(size, 1), 1)
    return (place // wide * channels + place % wide - (j - first)) * size


@register_jitable
def behind(j: int, first: int, last: int, channels: int, size: int) -> Any:
    """The same where runs are taken from the last to the first."""
    found = ahead(first + last - 1 - j, first, last, channels, size)
    return found if size > FAR else -found


@register_jitable
def rooms(x: Any) -> Any:
    """Sums of channels: two of the type of x, and two of float64."""
    return (np.zeros(MOST_TOGETHER * LANES, x.dtype), np.zeros(MOST_TOGETHER * LANES, x.dtype),
            np.zeros(MOST_TOGETHER * LANES), np.zeros(MOST_TOGETHER * LANES))


@register_jitable
def emptied(some: Any, all_: Any, to: int) -> None:
    """Adds lanes of the arrays' type to those of float64."""
    for k in range(to, to + BYTES // some.itemsize):
        all_[u(k)] += some[u(k)]
        some[u(k)] = 0


@register_jitable
def total(some: Any, all_: Any, to: int) -> Any:
    """The sum of a channel; its lanes are 0 then."""
    emptied(some, all_, to)
    step = BYTES // some.itemsize // 2
    while step > 0:
        for k in range(to, to + step):
            all_[u(k)] += all_[u(k + step)]
        step //= 2
    found = all_[to]
    all_[to:to + LANES] = 0
    return found


@register_jitable
def silu_passed(g: Any, x: Any, h: Any, samples: int, channels: int, size: int, first: int, last: int, centre: Any, scale: Any,
                shift: Any) -> None:
    """h = what the gradient g of SiLU becomes, which got (x - centre) * scale + shift."""
    for sample in range(samples):
        for j in range(first, last):
            m, s, b, at = centre[j - first], scale[j - first], shift[j - first], (sample * channels + j) * size
            for i in range(at, at + size):
                h[u(i)] = silu_both((x[u(i)] - m) * s + b)[1] * g[u(i)]


@register_jitable
def summed(x: Any, g: Any, y: Any, h: Any, samples: int, channels: int, size: int, first: int, last: int, centre: Any, scale: Any,
           shift: Any, masked: int, a: Any, b: Any, all_a: Any, all_b: Any) -> None:
    """Channels [first, last): both sums of `runs` of each, in lanes."""
    count = 0
    for sample in range(samples):
        inside = count
        for j in range(first, last):
            at, later, inside, place = (sample * channels + j) * size, ahead(j, first, last, channels, size), count, j - first
            to, stop = place * LANES, at + size
            while at < stop:
                n = min(stop - at, SPAN)
                if inside + n > SPAN:
                    emptied(a, all_a, to)
                    emptied(b, all_b, to)
                    inside = 0
                inside += n
                m, s, up = centre[place], scale[place], shift[place]
                if masked == MOMENTS:
                    add_moments(a, b, to, x, g, y, h, at, n, later, m, s, up)
                elif masked == 0:
                    add_plain(a, b, to, x, g, y, h, at, n, later, m, s, up)
                elif masked == 1:
                    add_passed(a, b, to, x, g, y, h, at, n, later, m, s, up)
                elif masked == 2:
                    add_signed(a, b, to, x, g, y, h, at, n, later, m, s, up)
                elif masked == 3:
                    add_signed6(a, b, to, x, g, y, h, at, n, later, m, s, up)
                else:
                    add_signed_swish(a, b, to, x, g, y, h, at, n, later, m, s, up)
                at += n
        count = inside


@register_jitable
def about(x: Any, centre: Any, samples: int, channels: int, size: int, first: int, last: int, a: Any, b: Any, all_a: Any,
          all_b: Any, mean: Any, squares: Any) -> None:
    """Mean, and sum of squared distances from it, from distances from `centre`."""
    summed(x, x, x, x, samples, channels, size, first, last, centre, centre, centre, MOMENTS, a, b, all_a, all_b)
    for j in range(first, last):
        plain, square = total(a, all_a, (j - first) * LANES), total(b, all_b, (j - first) * LANES)
        off = plain / max(samples * size, 1)
        square -= plain * off
        mean[j] = centre[j - first] + off
        squares[j] = choose(square < 0.0, 0.0, square)


@register_jitable
def moments(x: Any, samples: int, channels: int, size: int, first: int, last: int, a: Any, b: Any, all_a: Any, all_b: Any,
            mean: Any, squares: Any) -> None:
    """The same from distances from the mean of a few numbers; anew where that is far from the mean."""
    centre, few = np.zeros(last - first, x.dtype), min(size, FEW) if samples else 0
    for j in range(first, last if few else first):
        found = 0.0
        for i in range(few):
            found += x[j * size + i]
        centre[j - first] = found / few
    about(x, centre, samples, channels, size, first, last, a, b, all_a, all_b, mean, squares)
    for j in range(first, last):
        off = mean[j] - centre[j - first]
        if off * off * (samples * size) > 4 * squares[j]:
            centre[0] = mean[j]
            about(x, centre, samples, channels, size, j, j + 1, a, b, all_a, all_b, mean, squares)


def channel_moments(x: Any, mean: Any, squares: Any, samples: int, channels: int, size: int) -> None:
    a, b, all_a, all_b = rooms(x)
    step = together(x, samples, channels, size)
    for first in range(0, channels, step):
        moments(x, samples, channels, size, first, min(first + step, channels), a, b, all_a, all_b, mean, squares)


def channel_affine(x: Any, centre: Any, scale: Any, shift: Any, y: Any, samples: int, channels: int, size: int) -> None:
    for run in range(samples * channels):
        j = run % channels
        normalise(x, x, y, run * size, size, NEAR, centre[j], scale[j], shift[j])


def channel_combine(grad: Any, x: Any, centre: Any, a: Any, b: Any, d: Any, out: Any, samples: int, channels: int,
                    size: int) -> None:
    for run in range(samples * channels):
        j = run % channels
        sloped(grad, x, out, run * size, size, NEAR, centre[j], a[j], a[j], b[j], d[j])


def channel_sums(grad: Any, x: Any, centre: Any, plain: Any, product: Any, samples: int, channels: int, size: int) -> None:
    a, b, all_a, all_b = rooms(x)
    step = together(x, samples, channels, size)
    for first in range(0, channels, step):
        last = min(first + step, channels)
        middle = centre[first:last]
        summed(x, grad, x, a, samples, channels, size, first, last, middle, middle, middle, 0, a, b, all_a, all_b)
        for j in range(first, last):
            plain[j], product[j] = total(a, all_a, (j - first) * LANES), total(b, all_b, (j - first) * LANES)


@register_jitable
def normalised(x: Any, residual: Any, y: Any, samples: int, channels: int, size: int, first: int, last: int, centre: Any,
               scale: Any, shift: Any, activation: int) -> None:
    for sample in range(samples - 1, -1, -1):
        for j in range(last - 1, first - 1, -1):
            at, later, place = (sample * channels + j) * size, behind(j, first, last, channels, size), j - first
            if residual.size and activation:
                add_residual_relu(x, residual, y, at, size, later, centre[place], scale[place], shift[place])
            elif residual.size:
                add_residual(x, residual, y, at, size, later, centre[place], scale[place], shift[place])
            elif activation == 1:
                normalise_relu(x, residual, y, at, size, later, centre[place], scale[place], shift[place])
            elif activation == 2:
                normalise_relu6(x, residual, y, at, size, later, centre[place], scale[place], shift[place])
            elif activation == SILU:
                normalise(x, residual, y, at, size, later, centre[place], scale[place], shift[place])
                for i in range(at, at + size):
                    y[u(i)] = silu_of(y[u(i)])
            elif activation:
                normalise_hardswish(x, residual, y, at, size, later, centre[place], scale[place], shift[place])
            else:
                normalise(x, residual, y, at, size, later, centre[place], scale[place], shift[place])


def batch_norm(x: Any, weight: Any, bias: Any, residual: Any, y: Any, mean: Any, variance: Any, inverse: Any, eps: float,
               samples: int, channels: int, size: int, activation: int) -> None:
    a, b, all_a, all_b = rooms(x)
    step, real = together(x, samples, channels, size), x.dtype.type
    centre, scale, shift = np.zeros(step, x.dtype), np.zeros(step, x.dtype), np.zeros(step, x.dtype)
    for first in range(0, channels, step):
        last = min(first + step, channels)
        moments(x, samples, channels, size, first, last, a, b, all_a, all_b, mean, variance)
        for j in range(first, last):
            variance[j] /= max(samples * size, 1)
            inverse[j] = 1 / math.sqrt(variance[j] + eps)
            centre[j - first] = mean[j]
            scale[j - first] = inverse[j] * weight[j] if weight.size else inverse[j]
            shift[j - first] = bias[j] if bias.size else real(0)
        normalised(x, residual, y, samples, channels, size, first, last, centre, scale, shift, activation)


@register_jitable
def slopes(grad: Any, x: Any, dx: Any, samples: int, channels: int, size: int, first: int, last: int, centre: Any, scale: Any,
           shift: Any, slope: Any, constant: Any, masked: int) -> None:
    for sample in range(samples - 1, -1, -1):
        for j in range(last - 1, first - 1, -1):
            at, later, k = (sample * channels + j) * size, behind(j, first, last, channels, size), j - first
            if masked == 2:
                sloped_signed(grad, x, dx, at, size, later, centre[k], scale[k], shift[k], slope[k], constant[k])
            elif masked == 3:
                sloped_signed6(grad, x, dx, at, size, later, centre[k], scale[k], shift[k], slope[k], constant[k])
            elif masked == 4:
                sloped_signed_swish(grad, x, dx, at, size, later, centre[k], scale[k], shift[k], slope[k], constant[k])
            else:
                sloped(grad, x, dx, at, size, later, centre[k], scale[k], shift[k], slope[k], constant[k])


def batch_norm_gradients(grad: Any, x: Any, y: Any, centre: Any, weight: Any, bias: Any, inverse: Any, dx: Any, h: Any,
                         plain: Any, product: Any, samples: int, channels: int, size: int, masked: int) -> None:
    a, b, all_a, all_b = rooms(x)
    step, real, count = together(x, samples, channels, size), x.dtype.type, max(samples * size, 1)
    scale, shift, slope, constant = (np.zeros(step, x.dtype), np.zeros(step, x.dtype), np.zeros(step, x.dtype),
                                     np.zeros(step, x.dtype))
    for first in range(0, channels, step):
        last = min(first + step, channels)
        middle = centre[first:last]
        for j in range(first, last):
            scale[j - first] = inverse[j] * weight[j] if weight.size else inverse[j]
            shift[j - first] = bias[j] if bias.size else real(0)
        if masked == SILU_BEFORE:
            silu_passed(grad, x, dx, samples, channels, size, first, last, middle, scale, shift)
            summed(x, dx, y, h, samples, channels, size, first, last, middle, scale, shift, 0, a, b, all_a, all_b)
        else:
            summed(x, grad, y, h, samples, channels, size, first, last, middle, scale, shift, masked, a, b, all_a, all_b)
        for j in range(first, last):
            k = j - first
            plain[j], product[j] = total(a, all_a, k * LANES), total(b, all_b, k * LANES)
            slope[k] = -scale[k] * inverse[j] * inverse[j] * (product[j] / count)
            constant[k] = -scale[k] * (plain[j] / count)
        if dx.size and masked == 1:
            slopes(h, x, dx, samples, channels, size, first, last, middle, scale, shift, slope, constant, masked)
        elif dx.size and masked == SILU_BEFORE:
            slopes(dx, x, dx, samples, channels, size, first, last, middle, scale, shift, slope, constant, 0)
        elif dx.size:
            slopes(grad, x, dx, samples, channels, size, first, last, middle, scale, shift, slope, constant, masked)
