"""Convolutions without C: by Winograd where that suits, else over unfolded windows. Their signatures are those of C, where the
geometry is native/geometry.h's; the working memory behind it is C's.
"""

from __future__ import annotations

from typing import Any

from mpitrain.backend.namespace import Array
from mpitrain.kernels import convolution
from mpitrain.kernels.convolution import Window
from mpitrain.kernels.loops import unfolded, winograd


def _of(geometry: Array) -> tuple[tuple[int, ...], Window, int]:
    """(the shape of the images, the windows, how many groups)."""
    n, c, h, w, kh, kw, sh, sw, ph, pw, dh, dw, _, _, _, groups = geometry.tolist()
    return (n, c, h, w), Window((kh, kw), (sh, sw), (ph, pw), (dh, dw)), groups


def forward(x: Array, weight: Array, bias: Array | None, y: Array, geometry: Array, *memory: Any) -> None:
    _, window, groups = _of(geometry)
    g = unfolded.geometry(x.shape, window, len(weight), groups)
    if winograd.suits(x, weight, window, groups):
        winograd.convolve(x, weight, bias, window.padding, y)
    elif unfolded.suits(g, x.itemsize):
        unfolded.convolve(x, weight, bias, groups, g, y)
    else:
        y[...] = convolution.convolve.reference(x, weight, bias, window, groups)


def adjoint(y: Array, weight: Array, bias: Array | None, x: Array, geometry: Array, *memory: Any) -> None:
    shape, window, groups = _of(geometry)
    g = unfolded.geometry(shape, window, len(weight), groups)
    if winograd.suits(y, weight, window, groups):
        winograd.adjoint(y, weight, bias, window.padding, x)
    elif unfolded.suits(g, y.itemsize):
        unfolded.adjoint(y, weight, bias, groups, g, x)
    else:
        x[...] = convolution.convolve_adjoint.reference(y, weight, bias, window, groups, shape[2:])


def kernel_gradient(x: Array, y: Array, weight: Array, bias: Array | None, of_x: int, geometry: Array, *memory: Any) -> None:
    _, window, groups = _of(geometry)
    g = unfolded.geometry(x.shape, window, y.shape[1], groups)
    if winograd.suits(x, weight, window, groups):
        weight[...] = winograd.kernel_gradient(x, y, window.padding)
    elif unfolded.suits(g, x.itemsize):
        weight[...] = unfolded.kernel_gradient(x, y, window, groups, g)
    else:
        convolution.kernel_gradient.reference(x, y, window, groups, weight)
    if bias is not None:
        bias[...] = convolution.channel_sums(x if of_x else y)
