"""Convolutions without C: by Winograd where that suits, else over unfolded windows. Their signatures are those of C, where the
geometry is native/geometry.h's; the working memory behind it is C's.

Winograd's way adds infinity to minus infinity where the image has one of them: an image whose results have NaN is done once more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array
from mpitrain.kernels import convolution
from mpitrain.kernels.convolution import Window
from mpitrain.kernels.loops import unfolded, winograd


def _of(geometry: Array) -> tuple[tuple[int, ...], Window, int]:
    """(the shape of the images, the windows, how many groups)."""
    n, c, h, w, kh, kw, sh, sw, ph, pw, dh, dw, _, _, _, groups = geometry.tolist()
    return (n, c, h, w), Window((kh, kw), (sh, sw), (ph, pw), (dh, dw)), groups


def _with_nan(images: Array) -> Array:
    return np.isnan(images.sum(axis=(1, 2, 3)))


def forward(x: Array, weight: Array, bias: Array | None, y: Array, geometry: Array, *memory: Any) -> None:
    _, window, groups = _of(geometry)
    if not winograd.suits(x, weight, window, groups):
        _forward(x, weight, bias, window, groups, y)
        return
    with np.errstate(invalid="ignore", over="ignore"):
        winograd.convolve(x, weight, bias, window.padding, y)
        for i in np.flatnonzero(_with_nan(y)):
            _forward(x[i:i + 1], weight, bias, window, groups, y[i:i + 1])


def _forward(x: Array, weight: Array, bias: Array | None, window: Window, groups: int, y: Array) -> None:
    g = unfolded.geometry(x.shape, window, len(weight), groups)
    if unfolded.suits(g, x.itemsize):
        unfolded.convolve(x, weight, bias, groups, g, y)
    else:
        y[...] = convolution.convolve.reference(x, weight, bias, window, groups)


def adjoint(y: Array, weight: Array, bias: Array | None, x: Array, geometry: Array, *memory: Any) -> None:
    _, window, groups = _of(geometry)
    if not winograd.suits(y, weight, window, groups):
        _adjoint(y, weight, bias, window, groups, x)
        return
    with np.errstate(invalid="ignore", over="ignore"):
        winograd.adjoint(y, weight, bias, window.padding, x)
        for i in np.flatnonzero(_with_nan(x)):
            _adjoint(y[i:i + 1], weight, bias, window, groups, x[i:i + 1])


def _adjoint(y: Array, weight: Array, bias: Array | None, window: Window, groups: int, x: Array) -> None:
    g = unfolded.geometry(x.shape, window, len(weight), groups)
    if unfolded.suits(g, y.itemsize):
        unfolded.adjoint(y, weight, bias, groups, g, x)
    else:
        x[...] = convolution.convolve_adjoint.reference(y, weight, bias, window, groups, x.shape[2:])


def kernel_gradient(x: Array, y: Array, weight: Array, bias: Array | None, of_x: int, geometry: Array, *memory: Any) -> None:
    _, window, groups = _of(geometry)
    g = unfolded.geometry(x.shape, window, y.shape[1], groups)
    tiles = winograd.suits(x, weight, window, groups)
    quick = tiles or unfolded.suits(g, x.itemsize)
    if quick:
        with np.errstate(invalid="ignore", over="ignore"):
            weight[...] = winograd.kernel_gradient(x, y, window.padding) if tiles else \
                unfolded.kernel_gradient(x, y, window, groups, g)
    if not quick or np.isnan(weight).any():                #  unfolded windows multiply NaN by zeros, too
        convolution.kernel_gradient.reference(x, y, window, groups, weight)
    if bias is not None:
        bias[...] = convolution.channel_sums(x if of_x else y)
