"""The loops of layer and RMS norm, by row of x (R, D). What belongs to a row is a 1-D array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import bind

Gradients = tuple[Array | None, Array | None, Array | None]


def _row_norm(x: Array, added: Array | None, weight: Array, bias: Array | None, eps: float,
              centred: bool) -> tuple[Array, Array, Array, Array]:
    xp = array_module(x)
    total = x if added is None else x + added
    means = total.mean(axis=1) if centred else xp.zeros(len(x), x.dtype)
    y = total - means[:, None]
    inverses = 1 / xp.sqrt((y * y).mean(axis=1) + x.dtype.type(eps))
    y *= inverses[:, None]
    y *= weight
    if bias is not None:
        y += bias
    return y, total, means, inverses


def _row_norm_gradients(grad: Array, x: Array, weight: Array, around: Array | None, means: Array, inverses: Array,
                        centred: bool, wanted: tuple[bool, bool]) -> Gradients:
    z = (x - means[:, None]) * inverses[:, None]
    dx = None
    if wanted[0]:
        dx = grad * weight
        slope = (dx * z).mean(axis=1, keepdims=True)
        if centred:
            dx -= dx.mean(axis=1, keepdims=True)
        dx -= z * slope
        dx *= inverses[:, None]
        if around is not None:
            dx += around
    if not wanted[1]:
        return dx, None, None
    return dx, (grad * z).sum(axis=0, dtype="float64"), grad.sum(axis=0, dtype="float64")


def _row_norm_host() -> Callable[..., tuple[Array, Array, Array, Array]] | None:
    function = bind("layer_norm", "row_norm", "ppppppppdiii")
    if function is None:
        return None

    def norm(x: Array, added: Array | None, weight: Array, bias: Array | None, eps: float,
             centred: bool) -> tuple[Array, Array, Array, Array]:
        x, y, (means, inverses) = np.ascontiguousarray(x), np.empty(x.shape, x.dtype), np.empty((2, len(x)), x.dtype)
        total = x if added is None else np.empty(x.shape, x.dtype)
        function(x, _packed(added), None if added is None else total, _packed(weight), _packed(bias), y, means, inverses, eps,
                 *x.shape, centred)
        return y, total, means, inverses
    return norm


def _row_norm_gradients_host() -> Callable[..., Gradients] | None:
    function = bind("layer_norm", "row_norm_gradients", "pppppppppiii")
    if function is None:
        return None

    def gradients(grad: Array, x: Array, weight: Array, around: Array | None, means: Array, inverses: Array, centred: bool,
                  wanted: tuple[bool, bool]) -> Gradients:
        dx = np.empty(x.shape, x.dtype) if wanted[0] else None
        product, plain = sums = np.empty((2, x.shape[1])) if wanted[1] else (None, None)
        room = np.empty(2 * x.shape[1], x.dtype) if wanted[1] else None
        function(np.ascontiguousarray(grad), np.ascontiguousarray(x), _packed(weight), _packed(around), means, inverses, dx,
                 sums if wanted[1] else None, room, *x.shape, centred)
        return dx, product, plain
    return gradients


def _packed(array: Array | None) -> Array | None:
    return None if array is None else np.ascontiguousarray(array)


def _normal(rng: Any, dtype: Any, *shapes: tuple[int, ...]) -> tuple[Array, ...]:
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


row_norm = Kernel("row_norm", _row_norm, host=_row_norm_host, tolerance=1e-5,
                  arguments=lambda rng, dtype: (*_normal(rng, dtype, (7, 99), (7, 99), (99,), (99,)), 1e-5, True))
"""(y, x + added, means, inverse deviations) from (x, added or None, weight, bias or None, eps, centred), where y is the second,
normalised; it is x where nothing is added. RMS norm is not centred."""

row_norm_gradients = Kernel(
    "row_norm_gradients", _row_norm_gradients, host=_row_norm_gradients_host, tolerance=1e-5,
    arguments=lambda rng, dtype: (*_normal(rng, dtype, (23, 99), (23, 99), (99,), (23, 99), (23,), (23,)), True, (True, True)))
"""(gradient of x, sums over rows of grad * normalised x, and of grad, float64 (D,)) from (grad, x, weight, what is added to the
first or None, means, inverse deviations, centred, (whether the first is wanted, whether the others are)); None for what is not
wanted."""
