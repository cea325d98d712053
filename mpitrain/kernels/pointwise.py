"""Activations that NumPy has no loop for, or only in several passes over memory; each value and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import bind

SQRT_HALF = math.sqrt(0.5)
INVERSE_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
TANH_SCALE, TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715        # of the GELU by tanh (Hendrycks and Gimpel, 2016)


def erf(x: Array) -> Array:
    """The error function from its series exp(-x^2) 2x/sqrt(pi) (1 + 2x^2/3 (1 + 2x^2/5 (...))); all terms positive.

    Beyond 6 it is 1 in float64; there the series has 130 terms.
    """
    xp = array_module(x)
    x = xp.clip(x, -6, 6)
    square = x * x
    total = xp.ones_like(x)
    for n in range(130, 0, -1):
        total *= square * (2 / (2 * n + 1))
        total += 1
    return xp.exp(-square) * total * (x * (2 / math.sqrt(math.pi)))


def _sigmoid(x: Array) -> Array:
    xp = array_module(x)
    small = xp.exp(-xp.abs(x))                    # never overflows
    return xp.where(x >= 0, 1, small).astype(x.dtype) / (1 + small)


def _relu_grad(result: Array, grad: Array) -> Array:
    return array_module(result).where(result > 0, grad, grad.dtype.type(0))


def _normal_distribution(x: Array) -> Array:
    return 0.5 * (1 + erf(x * SQRT_HALF))


def _gelu(x: Array) -> Array:
    return x * _normal_distribution(x)


def _gelu_grad(x: Array, grad: Array) -> Array:
    xp = array_module(x)
    return grad * (_normal_distribution(x) + x * xp.exp(-0.5 * x * x) * INVERSE_SQRT_2PI)


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + _inner_tanh(x))


def _gelu_tanh_grad(x: Array, grad: Array) -> Array:
    t = _inner_tanh(x)
    slope = TANH_SCALE * (1 + 3 * TANH_CUBIC * x * x)
    return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)


def _inner_tanh(x: Array) -> Array:
    return array_module(x).tanh(TANH_SCALE * (x + TANH_CUBIC * x * x * x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _silu_grad(x: Array, grad: Array) -> Array:
    s = _sigmoid(x)
    return grad * (s * (1 + x * (1 - s)))


def _host(name: str, inputs: int) -> Callable[..., Array] | None:
    call = bind("pointwise", name, "p" * (inputs + 1) + "i")
    if call is None:
        return None

    def run(*arrays: Array) -> Array:
        arrays = tuple(np.asarray(a, order="C") for a in arrays)
        result = np.empty_like(arrays[0])
        call(*arrays, result, result.size)
        return result
    return run


def _kernel(name: str, reference: Callable[..., Array], inputs: int) -> Kernel:
    def arguments(rng: Any, dtype: Any) -> tuple[Array, ...]:
        x = (3 * rng.standard_normal((5, 33))).astype(dtype)
        x[0, :8] = [0, -0.0, 1e-8, -20, 20, -100, 100, 5.9]
        return x, rng.standard_normal(x.shape).astype(dtype)

    return Kernel(name, reference, host=lambda: _host(name, inputs),
                  arguments=lambda rng, dtype: arguments(rng, dtype)[:inputs], tolerance=2e-6)


@dataclass(frozen=True)
class Pair:
    """``values(x)`` and ``gradient(x, grad)``."""

    values: Kernel
    gradient: Kernel


def _relu(x: Array) -> Array:
    return array_module(x).maximum(x, x.dtype.type(0))


relu = _kernel("relu", _relu, 1)
sigmoid = _kernel("sigmoid", _sigmoid, 1)
relu_grad = _kernel("relu_grad", _relu_grad, 2)
GELU = Pair(_kernel("gelu", _gelu, 1), _kernel("gelu_grad", _gelu_grad, 2))
GELU_TANH = Pair(_kernel("gelu_tanh", _gelu_tanh, 1), _kernel("gelu_tanh_grad", _gelu_tanh_grad, 2))
SILU = Pair(_kernel("silu", _silu, 1), _kernel("silu_grad", _silu_grad, 2))
