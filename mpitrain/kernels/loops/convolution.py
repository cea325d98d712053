"""Convolutions without C: by Winograd where that suits, else over windows. Their signatures are those of C, where the geometry is
native/geometry.h's; the working memory behind it is C's.

Winograd's way adds infinity to minus infinity where the image has one of them, and sums of pixels overflow before their products:
an image whose results are not all finite is done once more. So are gradients of kernels: sums over whole rows of windows multiply
pixels that are none's by 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array
from mpitrain.kernels import convolution
from mpitrain.kernels.convolution import Window
from mpitrain.kernels.kernel import Function
from mpitrain.kernels.loops import unfolded, winograd


def _of(geometry: Array) -> tuple[tuple[int, ...], Window, int]:
    """(the shape of the images, the windows, how many groups)."""
    n, c, h, w, kh, kw, sh, sw, ph, pw, dh, dw, _, _, _, groups = geometry.tolist()
    return (n, c, h, w), Window((kh, kw), (sh, sw), (ph, pw), (dh, dw)), groups


def forward(x: Array, weight: Array, bias: Array | None, y: Array, geometry: Array, *memory: Any) -> None:
    _convolve(winograd.convolve, _forward, x, weight, bias, y, geometry)


def adjoint(y: Array, weight: Array, bias: Array | None, x: Array, geometry: Array, *memory: Any) -> None:
    _convolve(winograd.adjoint, _adjoint, y, weight, bias, x, geometry)


def _convolve(tiles: Function, windows: Function, x: Array, weight: Array, bias: Array | None, y: Array, geometry: Array) -> None:
    """y = x in tiles, as Winograd does, where that suits; in windows, the images that it spoils, and all where it does not."""
    _, window, groups = _of(geometry)
    if not winograd.suits(x, weight, window, groups):
        windows(x, weight, bias, y, window, groups)
        return
    spoilt = tiles(x, weight, bias, window.padding, y)
    if spoilt.any():
        again = y[spoilt]
        windows(x[spoilt], weight, bias, again, window, groups)
        y[spoilt] = again


def _forward(x: Array, weight: Array, bias: Array | None, y: Array, window: Window, groups: int) -> None:
    g = unfolded.geometry(x.shape, window, len(weight), groups)
    if unfolded.suits(g, x.itemsize):
        unfolded.convolve(x, weight, bias, groups, g, y)
    else:
        y[...] = convolution.convolve.reference(x, weight, bias, window, groups)


def _adjoint(y: Array, weight: Array, bias: Array | None, x: Array, window: Window, groups: int) -> None:
    g = unfolded.geometry(x.shape, window, len(weight), groups)
    if unfolded.suits(g, y.itemsize):
        unfolded.adjoint(y, weight, bias, groups, g, x)
    else:
        x[...] = convolution.convolve_adjoint.reference(y, weight, bias, window, groups, x.shape[2:])


def kernel_gradient(x: Array, y: Array, weight: Array, bias: Array | None, of_x: int, geometry: Array, *memory: Any) -> None:
    _, window, groups = _of(geometry)
    g, made = unfolded.geometry(x.shape, window, y.shape[1], groups), None
    if winograd.suits(x, weight, window, groups):
        with np.errstate(invalid="ignore", over="ignore"):
            made = winograd.kernel_gradient(x, y, window.padding)
    elif unfolded.suits(g, x.itemsize):
        made = unfolded.kernel_gradient(x, y, window, groups, g)
    if made is None or not np.isfinite(made).all():
        convolution.kernel_gradient.reference(x, y, window, groups, weight)
    else:
        weight[...] = made
    if bias is not None:
        bias[...] = convolution.channel_sums(x if of_x else y)
