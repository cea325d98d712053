"""Convolutions without C: by Winograd where that suits, else products of BLAS over unfolded windows, as the reference."""

from __future__ import annotations

import numpy as np

from mpitrain.backend.namespace import Array
from mpitrain.kernels import convolution
from mpitrain.kernels.convolution import Pair, Window
from mpitrain.kernels.loops import winograd


def convolve(x: Array, weight: Array, bias: Array | None, window: Window, groups: int) -> Array:
    if winograd.suits(x, weight, window, groups):
        return winograd.convolve(np.ascontiguousarray(x), weight, bias, window.padding)
    return convolution.convolve.reference(x, weight, bias, window, groups)


def convolve_adjoint(y: Array, weight: Array, bias: Array | None, window: Window, groups: int, size: Pair) -> Array:
    if winograd.suits(y, weight, window, groups):
        return winograd.adjoint(np.ascontiguousarray(y), weight, bias, window.padding)
    return convolution.convolve_adjoint.reference(y, weight, bias, window, groups, size)


def kernel_gradient(x: Array, y: Array, window: Window, groups: int, out: Array | None = None,
                    bias_of: str = "") -> tuple[Array, Array | None]:
    if not winograd.suits(x, np.empty((y.shape[1], x.shape[1], 0), x.dtype), window, groups):
        return convolution.kernel_gradient.reference(x, y, window, groups, out, bias_of)
    bias = convolution.channel_sums(x if bias_of == "x" else y) if bias_of else None
    made = winograd.kernel_gradient(np.ascontiguousarray(x), np.ascontiguousarray(y), window.padding)
    if out is None:
        return made, bias
    out[...] = made
    return out, bias
