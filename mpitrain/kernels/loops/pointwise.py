"""Activations and their gradients as in native/pointwise.h: the same operations in the same order, so the same bits.

What is read is copied to a part that stays in the cache first, since a result may take its memory: LLVM makes vector code only
of loops whose arrays are apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.backend.namespace import Array
from mpitrain.kernels.kernel import Function
from mpitrain.kernels.loops.mathematics import choose, constant, density, fma, normal_tail, sigmoid, u
from mpitrain.kernels.loops.typed import loop
from mpitrain.kernels.sums import EXACT, sum_rows

PART = 512


def values(of: Function) -> Function:
    """``run(x, out=None)``: `of` each number."""
    @loop("x y")
    def run(x: Any, y: Any) -> None:
        part = np.empty(PART, x.dtype)
        for at in range(0, x.size, PART):
            n = min(PART, x.size - at)
            for i in range(n):
                part[i] = x[u(at + i)]
            for i in range(n):
                y[u(at + i)] = of(part[i])

    def call(x: Array, out: Array | None = None) -> Array:
        x = np.asarray(x, order="C")
        result = np.empty_like(x) if out is None else out
        run(x, result)
        return result
    return call


def values_and_slopes(of: Function) -> Function:
    """``run(x, slope)``: the first of what `of` gives of each number; the other goes to `slope`, perhaps the memory of x."""
    @loop("x y y")
    def run(x: Any, slope: Any, y: Any) -> None:
        part = np.empty(PART, x.dtype)
        for at in range(0, x.size, PART):
            n = min(PART, x.size - at)
            for i in range(n):
                part[i] = x[u(at + i)]
            for i in range(n):
                y[u(at + i)], slope[u(at + i)] = of(part[i])

    def call(x: Array, slope: Array) -> Array:
        x = np.asarray(x, order="C")
        result = np.empty_like(x)
        run(x, slope, result)
        return result
    return call


def gradients(of: Function, in_place: bool = False) -> Function:
    """``run(kept, grad, sums)``: `of` each two numbers, and the sums of that over rows where they are wanted."""
    @loop("x x y y i i")
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

    def call(kept: Array, grad: Array, sums: Array | None) -> Array:
        kept, grad = np.asarray(kept, order="C"), np.asarray(grad, order="C")
        result = kept if in_place else np.empty_like(kept)
        if sums is None or len(kept) > EXACT:
            run(kept, grad, result, result.reshape(-1)[:0], 1, kept.size)
            if sums is not None:
                sum_rows(result, sums)
        else:
            run(kept, grad, result, sums, *kept.shape)
        return result
    return call


@register_jitable
def relu(x: Any) -> Any:
    return choose(x < 0, constant(x, 0.0), x)


@register_jitable
def distribution(x: Any, at: Any) -> Any:
    tail = normal_tail(x, at)
    return choose(x > 0, constant(x, 1.0) - tail, tail)


@register_jitable
def gelu(x: Any) -> Any:
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
def gelu_tanh(x: Any) -> Any:
    return x * sigmoid(twice_u(x))


@register_jitable
def gelu_tanh_both(x: Any) -> Any:
    s = sigmoid(twice_u(x))
    y = x * s
    steep = fma(x * x, constant(x, 0.214064448817800755), constant(x, 1.59576912160573071))
    return y, fma(y * (constant(x, 1.0) - s), steep, s)


@register_jitable
def silu(x: Any) -> Any:
    return x * sigmoid(x)


@register_jitable
def silu_both(x: Any) -> Any:
    s = sigmoid(x)
    y = x * s
    return y, fma(y, constant(x, 1.0) - s, s)


@register_jitable
def slope_grad(slope: Any, grad: Any) -> Any:
    return slope * grad


@register_jitable
def relu_grad(y: Any, grad: Any) -> Any:
    return choose(y <= 0, constant(y, 0.0), grad)


@register_jitable
def tanh_grad(y: Any, grad: Any) -> Any:
    return (constant(y, 1.0) - y * y) * grad


@register_jitable
def sigmoid_grad(y: Any, grad: Any) -> Any:
    return (constant(y, 1.0) - y) * y * grad
