"""Every stride-th pixel of images between channels of zeros, in one pass, and the adjoint."""

from __future__ import annotations

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host, packed


def _subsample(x: Array, stride: int, before: int, after: int) -> Array:
    return array_module(x).pad(x[:, :, ::stride, ::stride], [(0, 0), (before, after), (0, 0), (0, 0)])


def _gradient(grad: Array, shape: tuple[int, ...], stride: int, before: int) -> Array:
    result = array_module(grad).zeros(shape, grad.dtype)
    result[:, :, ::stride, ::stride] = grad[:, before:before + shape[1]]
    return result


@host("subsample", "subsample", "ppiiiiiiiii")
def _subsample_host(function: CFunction, x: Array, stride: int, before: int, after: int) -> Array:
    n, c, h, w = x.shape
    y = np.empty((n, before + c + after, -(-h // stride), -(-w // stride)), x.dtype)
    function(packed(x), y, *x.shape, *y.shape[2:], stride, before, after)
    return y


@host("subsample", "subsample_gradient", "ppiiiiiiiii")
def _gradient_host(function: CFunction, grad: Array, shape: tuple[int, ...], stride: int, before: int) -> Array:
    result = np.empty(shape, grad.dtype)
    function(packed(grad), result, *shape, *grad.shape[2:], stride, before, grad.shape[1] - before - shape[1])
    return result


subsample = Kernel("subsample", _subsample, host=_subsample_host)
"""(N, before + C + after, OH, OW) from (x (N, C, H, W), stride, before, after)."""

subsample_gradient = Kernel("subsample_gradient", _gradient, host=_gradient_host)
"""(N, C, H, W) from (gradient of that, shape of x, stride, before)."""
