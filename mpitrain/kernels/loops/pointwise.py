"""Activations and their gradients as in native/pointwise.h: the same operations in the same order, so the same bits.

What is read is copied to a part that stays in the cache first, since a result may take its memory: LLVM makes vector code only
of loops whose arrays are apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.kernels.kernel import Function
from mpitrain.kernels.loops.mathematics import choose, constant, density, fma, normal_tail, u
from mpitrain.kernels.loops.mathematics import sigmoid as sigmoid_of

PART = 512


def values(of: Function) -> Function:
    """y = `of` each number of x."""
    def run(x: Any, y: Any, count: int) -> None:
        part = np.empty(PART, x.dtype)
        for at in range(0, count, PART):
            n = min(PART, count - at)
            for i in range(n):
                part[i] = x[u(at + i)]
            for i in range(n):
                y[u(at + i)] = of(part[i])
    return run


def values_and_slopes(of: Function) -> Function:
    """y = the first of what `of` gives of each number of x; the other goes to `slope`, perhaps the memory of x."""
    def run(x: Any, slope: Any, y: Any, count: int) -> None:
        part = np.empty(PART, x.dtype)
        for at in range(0, count, PART):
            n = min(PART, count - at)
            for i in range(n):
                part[i] = x[u(at + i)]
            for i in range(n):
                y[u(at + i)], slope[u(at + i)] = of(part[i])
    return run


def gradients(of: Function) -> Function:
    """made = `of` each two numbers, perhaps the memory of one of them; and the sums of that over rows where they are wanted."""
    def run(kept: Any, grad: Any, made: Any, sums: Any, rows: int, width: int) -> None:
        part = np.empty(PART, grad.dtype)
        for j in range(sums.size):
            sums[j] = 0
        for row in range(rows):
            for first in range(0, width, PART):
                n, at = min(PART, width - first), row * width + first
                for i in range(n):
                    part[i] = of(kept[u(at + i)], grad[u(at + i)])
                for i in range(n):
                    made[u(at + i)] = part[i]
                if sums.size:
                    for i in range(n):
                        sums[u(first + i)] += part[i]
    return run


@register_jitable
def relu_of(x: Any) -> Any:
    return choose(x < 0, constant(x, 0.0), x)


@register_jitable
def distribution(x: Any, at: Any) -> Any:
    tail = normal_tail(x, at)
    return choose(x > 0, constant(x, 1.0) - tail, tail)


@register_jitable
def gelu_of(x: Any) -> Any:
    return x * distribution(x, density(x))


@register_jitable
def gelu_both(x: Any) -> Any:
    at = density(x)
    below = distribution(x, at)
    return x * below, fma(x, at, below)


@register_jitable
def twice_u(x: Any) -> Any:
    return x * fma(x * x, constant(x, 0.0713548162726002504), constant(x, 1.59576912160573071))


@register_jitable
def gelu_tanh_of(x: Any) -> Any:
    return x * sigmoid_of(twice_u(x))


@register_jitable
def gelu_tanh_both(x: Any) -> Any:
    s = sigmoid_of(twice_u(x))
    y = x * s
    steep = fma(x * x, constant(x, 0.214064448817800755), constant(x, 1.59576912160573071))
    return y, fma(y * (constant(x, 1.0) - s), steep, s)


@register_jitable
def silu_of(x: Any) -> Any:
    return x * sigmoid_of(x)


@register_jitable
def silu_both(x: Any) -> Any:
    s = sigmoid_of(x)
    y = x * s
    return y, fma(y, constant(x, 1.0) - s, s)


@register_jitable
def by_slope(slope: Any, grad: Any) -> Any:
    return slope * grad


@register_jitable
def by_relu(y: Any, grad: Any) -> Any:
    return choose(y <= 0, constant(y, 0.0), grad)


@register_jitable
def by_tanh(y: Any, grad: Any) -> Any:
    return (constant(y, 1.0) - y * y) * grad


@register_jitable
def by_sigmoid(y: Any, grad: Any) -> Any:
    return (constant(y, 1.0) - y) * y * grad


relu, sigmoid, gelu, gelu_tanh, silu = map(values, (relu_of, sigmoid_of, gelu_of, gelu_tanh_of, silu_of))
gelu_and_slope, gelu_tanh_and_slope, silu_and_slope = map(values_and_slopes, (gelu_both, gelu_tanh_both, silu_both))
slope_grad, relu_grad, tanh_grad, sigmoid_grad = map(gradients, (by_slope, by_relu, by_tanh, by_sigmoid))
