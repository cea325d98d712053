"""Patches of images as columns and back, pixels from channels and back, and values at any positions of an image."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels import convolution
from mpitrain.kernels.convolution import Pair, Window
from mpitrain.ops.choice import clip, where
from mpitrain.ops.elementwise import absolute
from mpitrain.ops.geometry import Numbers, numbers
from mpitrain.ops.index import getitem
from mpitrain.ops.inputs import as_tensor
from mpitrain.ops.linalg import matmul
from mpitrain.ops.shape import expand_dims, reshape, swapaxes, transpose

__all__ = ["affine_grid", "channel_shuffle", "fold", "grid_sample", "im2col", "pixel_shuffle", "pixel_unshuffle"]


def im2col(x: Any, kernel_size: Numbers, dilation: Numbers = 1, padding: Numbers = 0, stride: Numbers = 1) -> Tensor:
    """The patches of x (N, C, H, W), or (C, H, W), as columns: (N, C kh kw, L) for L windows, row by row. PyTorch calls
    this nn.functional.unfold; its Tensor.unfold is `ops.unfold`."""
    x = as_tensor(x)
    if x.ndim == 3:
        y = im2col(expand_dims(x, 0), kernel_size, dilation, padding, stride)
        return reshape(y, y.shape[1:])
    window = _window("im2col", kernel_size, dilation, padding, stride)
    if x.ndim != 4 or min(x.shape[1:]) < 1:
        raise ShapeError(f"im2col: the input has shape {x.shape}, expected (N, C, H, W), or that without N")
    _check_outputs("im2col", window, x.shape[2:])
    return Unfold.apply(x, window=window)


def fold(x: Any, output_size: Numbers, kernel_size: Numbers, dilation: Numbers = 1, padding: Numbers = 0,
         stride: Numbers = 1) -> Tensor:
    """Images (N, C, *output_size) of columns x (N, C kh kw, L): what overlaps is added. The adjoint of `im2col`."""
    x = as_tensor(x)
    if x.ndim == 2:
        y = fold(expand_dims(x, 0), output_size, kernel_size, dilation, padding, stride)
        return reshape(y, y.shape[1:])
    window, size = _window("fold", kernel_size, dilation, padding, stride), numbers("fold", "output_size", output_size, 2)
    _check_outputs("fold", window, size)
    if x.ndim != 3 or x.shape[1] % prod(window.kernel) or not x.shape[1] or x.shape[2] != prod(window.outputs(*size)):
        raise ShapeError(f"fold: columns of shape {x.shape}, expected (N, C * {prod(window.kernel)}, "
                         f"{prod(window.outputs(*size))}) for the output size {size}")
    return Fold.apply(x, window=window, size=(size[0], size[1]))


def _window(name: str, kernel: Numbers, dilation: Numbers, padding: Numbers, stride: Numbers) -> Window:
    found: Any = [numbers(name, what, value, 2, least) for what, value, least in (
        ("kernel_size", kernel, 1), ("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1))]
    return Window(*found)


def _check_outputs(name: str, window: Window, size: Sequence[int]) -> None:
    if min(window.outputs(size[0], size[1])) < 1:
        raise ShapeError(f"{name}: the window {window.kernel} with dilation {window.dilation} does not fit into images of "
                         f"{size[0]}x{size[1]} with padding {window.padding}; make it smaller or pad more")


class Unfold(Function):
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, *, window: Window) -> Array:
        ctx.window, ctx.size = window, x.shape[2:]
        return convolution.unfold(x, window)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Fold.apply(grad, window=ctx.window, size=ctx.size)


class Fold(Function):
    complex_inputs = "analytic"

    @staticmethod
    def forward(ctx: Context, x: Array, *, window: Window, size: Pair) -> Array:
        ctx.window = window
        return convolution.fold(x, window, size)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Unfold.apply(grad, window=ctx.window)


def pixel_shuffle(x: Any, upscale_factor: int) -> Tensor:
    """(..., C, r H, r W) of x (..., C r^2, H, W), for r = `upscale_factor`; Shi et al. 2016."""
    x, r = as_tensor(x), upscale_factor
    if x.ndim < 3 or r < 1 or x.shape[-3] % (r * r):
        raise ShapeError(f"pixel_shuffle: shape {x.shape} with factor {r}, expected (..., C, H, W) with a multiple of r^2 "
                         "channels")
    *outer, c, h, w = x.shape
    n = len(outer)
    parts = transpose(reshape(x, (*outer, c // (r * r), r, r, h, w)), (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return reshape(parts, (*outer, c // (r * r), h * r, w * r))


def pixel_unshuffle(x: Any, downscale_factor: int) -> Tensor:
    """The inverse of `pixel_shuffle`."""
    x, r = as_tensor(x), downscale_factor
    if x.ndim < 3 or r < 1 or x.shape[-1] % r or x.shape[-2] % r:
        raise ShapeError(f"pixel_unshuffle: shape {x.shape} with factor {r}, expected (..., C, H, W) with multiples of r "
                         "for H and W")
    *outer, c, h, w = x.shape
    n = len(outer)
    parts = transpose(reshape(x, (*outer, c, h // r, r, w // r, r)), (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return reshape(parts, (*outer, c * r * r, h // r, w // r))


def channel_shuffle(x: Any, groups: int) -> Tensor:
    """x (N, C, ...) with channel c of group g at place c groups + g; Zhang et al. 2018."""
    x = as_tensor(x)
    if x.ndim < 3 or groups < 1 or x.shape[1] % groups:
        raise ShapeError(f"channel_shuffle: shape {x.shape} in {groups} groups, expected (N, C, ...) with a multiple of them")
    return reshape(swapaxes(reshape(x, (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])), 1, 2), x.shape)


def affine_grid(theta: Any, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """Positions for `grid_sample` of images of `size` (N, C, H, W), (N, H, W, 2), or volumes: theta (N, 2, 3) or (N, 3, 4) times
    each position from -1 to 1, and 1."""
    theta, space = as_tensor(theta), list(size[2:])
    dims = len(space)
    if dims not in (2, 3) or theta.shape != (size[0], dims, dims + 1) or min(size) < 1:
        raise ShapeError(f"affine_grid: theta {theta.shape} for the size {tuple(size)}, expected (N, 2, 3) for (N, C, H, W), or "
                         "(N, 3, 4) for (N, C, D, H, W)")
    sides = [np.linspace(-1, 1, n) * (1 if align_corners else (n - 1) / n) if n > 1 else np.zeros(1) for n in space]
    places = np.stack([*np.meshgrid(*sides, indexing="ij")[::-1], np.ones(space)], -1).reshape(-1, dims + 1)
    made = matmul(Tensor(theta.xp.asarray(places.astype(theta.dtype))), swapaxes(theta, 1, 2))
    return reshape(made, (size[0], *space, dims))


def grid_sample(x: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros",
                align_corners: bool | None = None) -> Tensor:
    """The values of images x (N, C, H, W) at `grid` (N, h, w, 2), or of volumes at (N, d, h, w, 3): (N, C, h, w).

    Positions are x first, then y (and z), from -1 to 1: the middles of the corner pixels with `align_corners`, else their outer
    edges. `mode`: "bilinear" (in volumes trilinear), "nearest", "bicubic" (images). Outside are "zeros", the "border", or its
    "reflection". Gradients go to x and to the grid.
    """
    x, grid = as_tensor(x), as_tensor(grid)
    dims = x.ndim - 2
    if dims not in (2, 3) or grid.ndim != x.ndim or grid.shape[0] != x.shape[0] or grid.shape[-1] != dims or min(x.shape[1:]) < 1:
        raise ShapeError(f"grid_sample: an input of shape {x.shape} and a grid of shape {grid.shape}, expected (N, C, H, W) and "
                         "(N, h, w, 2), or (N, C, D, H, W) and (N, d, h, w, 3)")
    if mode not in ("bilinear", "nearest", "bicubic") or padding_mode not in ("zeros", "border", "reflection") or (
            mode == "bicubic" and dims == 3):
        raise ShapeError(f'grid_sample: mode "{mode}" and padding_mode "{padding_mode}"; expected bilinear, nearest or, for '
                         "images, bicubic, and zeros, border or reflection")
    positions = [_pixels(grid[..., dims - 1 - d], x.shape[2 + d], bool(align_corners)) for d in range(dims)]
    if mode != "bicubic":
        positions = [_inside(p, n, padding_mode, bool(align_corners)) for p, n in zip(positions, x.shape[2:])]
    taps = [_taps(p, mode) for p in positions]
    total: Any = None
    for chosen in product(*taps):
        weight: Any = None
        index: list[Any] = []
        valid: Any = True
        for (place, share), n in zip(chosen, x.shape[2:]):
            if mode == "bicubic" and padding_mode != "zeros":
                place = _inside(Tensor(place), n, padding_mode, bool(align_corners)).array
            inside = (place >= 0) & (place <= n - 1)          # NaN is nowhere
            index.append(x.xp.where(inside, place, 0).astype("int64"))
            valid = valid & inside
            if share is not None:
                weight = share if weight is None else weight * share
        part = getitem(x, (x.xp.arange(len(x)).reshape(-1, *[1] * dims), slice(None), *index))
        part = where(valid[..., None], part, x.dtype.type(0))
        if weight is not None:
            part = part * expand_dims(weight, -1)
        total = part if total is None else total + part
    return transpose(total, (0, dims + 1, *range(1, dims + 1)))


def _pixels(position: Tensor, n: int, align: bool) -> Tensor:
    return (position + 1.0) * ((n - 1) / 2) if align else ((position + 1.0) * n - 1.0) * 0.5


def _inside(p: Tensor, n: int, padding: str, align: bool) -> Tensor:
    """Positions moved to where there are pixels; NaN, and what infinity is reflected to, to the first, as PyTorch does."""
    if padding == "zeros":
        return p
    p = where(p.xp.isfinite(p.array) if padding == "reflection" else p.array == p.array, p, p.dtype.type(0))
    if padding == "reflection":
        low, span = (0.0, float(n - 1)) if align else (-0.5, float(n))
        away = absolute(p - low)
        flips = Tensor(p.xp.floor(away.array / (span or p.xp.inf)).astype(p.dtype))
        rest = away - flips * span
        odd = Tensor((flips.array % 2).astype(p.dtype))
        p = rest * (1.0 - odd * 2.0) + odd * span + low
    return clip(p, 0.0, float(n - 1))


def _taps(p: Tensor, mode: str) -> list[tuple[Any, Any]]:
    """Pixels next to p, and their shares of it; None for all."""
    if mode == "nearest":
        return [(p.xp.rint(p.array), None)]
    left = p.xp.floor(p.array)
    share = p - Tensor(left)
    if mode == "bilinear":
        return [(left, 1.0 - share), (left + 1, share)]
    a = -0.75                                     # Keys (1981), as `interpolate` has it
    near = [share, 1.0 - share]
    inner = [((d * (a + 2) - (a + 3)) * d * d + 1.0) for d in near]
    outer = [(((d + 1.0) * a - 5 * a) * (d + 1.0) + 8 * a) * (d + 1.0) - 4 * a for d in near]
    return [(left - 1, outer[0]), (left, inner[0]), (left + 1, inner[1]), (left + 2, outer[1])]
