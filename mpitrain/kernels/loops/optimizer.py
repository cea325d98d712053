"""Optimizer updates as in native/optimizer.c: the same bits. `s` are the scalars, in the order of kernels/optimizer.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpitrain.kernels.kernel import Function
from mpitrain.kernels.loops.typed import loop


@loop("y x x")
def sgd(w: Any, gradient: Any, s: Any) -> None:
    lr, decay, scale = s[0], s[1], s[2]
    for i in range(w.size):
        w[i] -= lr * (gradient[i] * scale + decay * w[i])


@loop("y x y x")
def sgd_momentum(w: Any, gradient: Any, buffer: Any, s: Any) -> None:
    lr, momentum, own, ahead, decay, scale = s[0], s[1], s[2], s[3], s[4], s[5]
    for i in range(w.size):
        g = gradient[i] * scale + decay * w[i]
        velocity = buffer[i] * momentum + g
        buffer[i] = velocity
        w[i] -= lr * (own * g + ahead * velocity)


@loop("y x y y x")
def adam(w: Any, gradient: Any, m: Any, v: Any, s: Any) -> None:
    step_size, keep, penalty, new1, old2, new2, root, eps, scale = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8]
    for i in range(w.size):
        g = gradient[i] * scale + penalty * w[i]
        first = m[i] + new1 * (g - m[i])
        second = v[i] * old2 + new2 * g * g
        m[i] = first
        v[i] = second
        w[i] = w[i] * keep - step_size * first / (math.sqrt(second) * root + eps)


@loop("x x y y y x")
def lamb(w: Any, gradient: Any, direction: Any, m: Any, v: Any, s: Any) -> None:
    new1, old2, new2, correct1, root, eps, decay, scale = s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]
    for i in range(w.size):
        g = gradient[i] * scale
        first = m[i] + new1 * (g - m[i])
        second = v[i] * old2 + new2 * g * g
        m[i] = first
        v[i] = second
        direction[i] = correct1 * first / (math.sqrt(second) * root + eps) + decay * w[i]


@loop("y x y y x")
def rmsprop(w: Any, gradient: Any, square: Any, buffer: Any, s: Any) -> None:
    lr, momentum, old, new, eps, decay, scale = s[0], s[1], s[2], s[3], s[4], s[5], s[6]
    for i in range(w.size):
        g = gradient[i] * scale + decay * w[i]
        second = square[i] * old + new * g * g
        velocity = buffer[i] * momentum + g / (math.sqrt(second) + eps)
        square[i] = second
        buffer[i] = velocity
        w[i] -= lr * velocity


def update(name: str, arrays: int) -> Function:
    """The rule of this name as a kernel takes it: so many arrays, and then scalars."""
    run = globals()[name]

    def call(*arguments: Any) -> None:
        run(*arguments[:arrays], np.array(arguments[arrays:], arguments[0].dtype))
    return call
