"""Convolutions without C: by Winograd where that suits, else over unfolded windows.

Winograd's way adds infinity to minus infinity where the image has one of them: an image whose results have NaN is done once more.
"""

from __future__ import annotations

import numpy as np

from mpitrain.backend.namespace import Array
from mpitrain.kernels import convolution
from mpitrain.kernels.convolution import Pair, Window
from mpitrain.kernels.loops import unfolded, winograd


def convolve(x: Array, weight: Array, bias: Array | None, window: Window, groups: int) -> Array:
    x = np.ascontiguousarray(x)
    if not winograd.suits(x, weight, window, groups):
        return _convolve(x, weight, bias, window, groups)
    with np.errstate(invalid="ignore", over="ignore"):
        made = winograd.convolve(x, weight, bias, window.padding)
    spoilt = _with_nan(made)
    if spoilt.any():
        made[spoilt] = _convolve(x[spoilt], weight, bias, window, groups)
    return made


def _with_nan(images: Array) -> Array:
    with np.errstate(invalid="ignore", over="ignore"):
        return np.isnan(images.sum(axis=(1, 2, 3)))


def _convolve(x: Array, weight: Array, bias: Array | None, window: Window, groups: int) -> Array:
    g = unfolded.geometry(x.shape, window, len(weight), groups, x.itemsize)
    if not unfolded.suits(g, x.itemsize):
        return convolution.convolve.reference(x, weight, bias, window, groups)
    return unfolded.convolve(x, weight, bias, groups, g)


def convolve_adjoint(y: Array, weight: Array, bias: Array | None, window: Window, groups: int, size: Pair) -> Array:
    y = np.ascontiguousarray(y)
    if not winograd.suits(y, weight, window, groups):
        return _adjoint(y, weight, bias, window, groups, size)
    with np.errstate(invalid="ignore", over="ignore"):
        made = winograd.adjoint(y, weight, bias, window.padding)
    spoilt = _with_nan(made)
    if spoilt.any():
        made[spoilt] = _adjoint(y[spoilt], weight, bias, window, groups, size)
    return made


def _adjoint(y: Array, weight: Array, bias: Array | None, window: Window, groups: int, size: Pair) -> Array:
    g = unfolded.geometry((len(y), weight.shape[1] * groups, *size), window, len(weight), groups, y.itemsize)
    if not unfolded.suits(g, y.itemsize):
        return convolution.convolve_adjoint.reference(y, weight, bias, window, groups, size)
    return unfolded.adjoint(y, weight, bias, groups, size, g)


def kernel_gradient(x: Array, y: Array, window: Window, groups: int, out: Array | None = None,
                    bias_of: str = "") -> tuple[Array, Array | None]:
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    g = unfolded.geometry(x.shape, window, y.shape[1], groups, x.itemsize)
    made = None
    if winograd.suits(x, np.empty((y.shape[1], x.shape[1], 0), x.dtype), window, groups):
        with np.errstate(invalid="ignore", over="ignore"):
            made = winograd.kernel_gradient(x, y, window.padding)
    elif unfolded.suits(g, x.itemsize):
        made = unfolded.kernel_gradient(x, y, window, groups, g)
    if made is None or np.isnan(made).any():               # between rows, windows meet zeros, and NaN times zero is NaN
        return convolution.kernel_gradient.reference(x, y, window, groups, out, bias_of)
    bias = convolution.channel_sums(x if bias_of == "x" else y) if bias_of else None
    if out is None:
        return made, bias
    out[...] = made
    return out, bias
