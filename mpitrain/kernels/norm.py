"""The loops of layer and RMS norm: by row of x (R, D). What belongs to a row is a 1-D array; sums over the rows are float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import bind
from mpitrain.kernels.library import packed as _packed


def _row_norm(x: Array, weight: Array | None, bias: Array | None, eps: float, centred: bool) -> tuple[Array, Array, Array]:
    xp = array_module(x)
    means = x.mean(axis=1) if centred else xp.zeros(len(x), x.dtype)
    y = x - means[:, None]
    inverses = 1 / xp.sqrt((y * y).mean(axis=1) + x.dtype.type(eps))
    y *= inverses[:, None]
    if weight is not None:
        y *= weight
    if bias is not None:
        y += bias
    return y, means, inverses


def _row_norm_gradients(grad: Array, x: Array, weight: Array | None, means: Array, inverses: Array, centred: bool,
                        wanted: tuple[bool, bool]) -> tuple[Array | None, Array | None, Array | None]:
    z = (x - means[:, None]) * inverses[:, None]
    dx = None
    if wanted[0]:
        dx = grad.copy() if weight is None else grad * weight
        slope = (dx * z).mean(axis=1, keepdims=True)
        if centred:
            dx -= dx.mean(axis=1, keepdims=True)
        dx -= z * slope
        dx *= inverses[:, None]
    if not wanted[1]:
        return dx, None, None
    return dx, (grad * z).sum(axis=0, dtype="float64"), grad.sum(axis=0, dtype="float64")


def _row_norm_host() -> Callable[..., Any] | None:
    function = bind("norm", "row_norm", "ppppppdiii")
    if function is None:
        return None

    def norm(x: Array, weight: Array | None, bias: Array | None, eps: float, centred: bool) -> tuple[Array, Array, Array]:
        y, means, inverses = np.empty(x.shape, x.dtype), np.empty(len(x), x.dtype), np.empty(len(x), x.dtype)
        function(_packed(x), _packed(weight), _packed(bias), y, means, inverses, eps, *x.shape, centred)
        return y, means, inverses
    return norm


def _row_norm_gradients_host() -> Callable[..., Any] | None:
    function = bind("norm", "row_norm_gradients", "ppppppppiii")
    if function is None:
        return None

    def gradients(grad: Array, x: Array, weight: Array | None, means: Array, inverses: Array, centred: bool,
                  wanted: tuple[bool, bool]) -> tuple[Array | None, Array | None, Array | None]:
        dx = np.empty(x.shape, x.dtype) if wanted[0] else None
        product, plain = (np.empty(x.shape[1]), np.empty(x.shape[1])) if wanted[1] else (None, None)
        function(_packed(grad), _packed(x), _packed(weight), means, inverses, dx, product, plain, *x.shape, centred)
        return dx, product, plain
    return gradients


def _example(*shapes: tuple[int, ...]) -> Callable[[Any, Any], tuple[Array, ...]]:
    return lambda rng, dtype: tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


row_norm = Kernel("row_norm", _row_norm, host=_row_norm_host, tolerance=1e-5,
                  arguments=lambda rng, dtype: (*_example((5, 37), (37,), (37,))(rng, dtype), 1e-5, True))
"""(y, means, inverse deviations) from (x, weight or None, bias or None, eps, centred); RMS norm is not centred."""

row_norm_gradients = Kernel(
    "row_norm_gradients", _row_norm_gradients, host=_row_norm_gradients_host, tolerance=1e-5,
    arguments=lambda rng, dtype: (*_example((7, 37), (7, 37), (37,), (7,), (7,))(rng, dtype), True, (True, True)))
"""(gradient of x, sums over rows of grad * normalised x, and of grad, float64 (D,)) from (grad, x, weight or None, means,
inverse deviations, centred, (whether the first is wanted, whether the others are)); None for what is not wanted."""
