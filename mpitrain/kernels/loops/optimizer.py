"""Optimizer updates as in native/optimizer.c: the same bits. `s` are the scalars, in the order of kernels/optimizer.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.kernels.optimizer import NORM_BLOCK


def sgd(w: Any, gradient: Any, s: Any, n: int) -> None:
    lr, decay, scale = s[0], s[1], s[2]
    for i in range(n):
        w[i] -= lr * (gradient[i] * scale + decay * w[i])


def sgd_momentum(w: Any, gradient: Any, buffer: Any, s: Any, n: int) -> None:
    lr, momentum, own, ahead, decay, scale = s[0], s[1], s[2], s[3], s[4], s[5]
    for i in range(n):
        g = gradient[i] * scale + decay * w[i]
        velocity = buffer[i] * momentum + g
        buffer[i] = velocity
        w[i] -= lr * (own * g + ahead * velocity)


def adam(w: Any, gradient: Any, m: Any, v: Any, s: Any, n: int) -> None:
    step_size, keep, penalty, new1, old2, new2, root, eps, scale = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8]
    for i in range(n):
        g = gradient[i] * scale + penalty * w[i]
        first = m[i] + new1 * (g - m[i])
        second = v[i] * old2 + new2 * g * g
        m[i] = first
        v[i] = second
        w[i] = w[i] * keep - step_size * first / (math.sqrt(second) * root + eps)


def lamb(w: Any, gradient: Any, direction: Any, m: Any, v: Any, s: Any, n: int) -> None:
    new1, old2, new2, correct1, root, eps, decay, scale = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]
    for i in range(n):
        g = gradient[i] * scale
        first = m[i] + new1 * (g - m[i])
        second = v[i] * old2 + new2 * g * g
        m[i] = first
        v[i] = second
        direction[i] = correct1 * first / (math.sqrt(second) * root + eps) + decay * w[i]


def rmsprop(w: Any, gradient: Any, square: Any, buffer: Any, s: Any, n: int) -> None:
    lr, momentum, old, new, eps, decay, scale = s[0], s[1], s[2], s[3], s[4], s[5], s[6]
    for i in range(n):
        g = gradient[i] * scale + decay * w[i]
        second = square[i] * old + new * g * g
        velocity = buffer[i] * momentum + g / (math.sqrt(second) + eps)
        square[i] = second
        buffer[i] = velocity
        w[i] -= lr * velocity


def square_sums(x: Any, n: int, out: Any) -> None:
    work = np.empty(NORM_BLOCK // 2)
    for block in range((n + NORM_BLOCK - 1) // NORM_BLOCK):
        first = block * NORM_BLOCK
        there = min(NORM_BLOCK, n - first)
        half = NORM_BLOCK // 2
        while half >= there and half > 1:          # the upper half is zeros, and adding them changes nothing
            half //= 2
        upper = max(0, there - half)
        for i in range(upper):
            a, b = np.float64(x[first + i]), np.float64(x[first + half + i])
            work[i] = a * a + b * b
        for i in range(upper, min(half, there)):
            a = np.float64(x[first + i])
            work[i] = a * a
        work[there:half] = 0.0
        while half > 1:
            half //= 2
            for i in range(half):
                work[i] += work[half + i]
        out[block] = work[0]
