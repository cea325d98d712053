"""Interpolation of series, images and volumes, and padding from the array itself: sparse linear maps, one dim after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels.resample import Taps, resample
from mpitrain.ops.geometry import LAYOUTS

__all__ = ["interpolate"]

Factor = float | Sequence[float] | None


class Resample(Function):
    """x with the linear map `taps` along `dim`; its derivative is the adjoint map."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, taps: Taps, dim: int) -> Array:
        if not taps.copies and x.dtype.kind != "f":
            raise ShapeError(f"interpolate: the input is {x.dtype}, expected float32 or float64; convert it first")
        ctx.taps, ctx.dim = taps, dim
        return resample(x, taps, dim)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return resample(grad, ctx.taps.transposed, ctx.dim)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Resample.apply(grad, taps=ctx.taps.transposed, dim=ctx.dim)


def interpolate(x: Any, size: int | Sequence[int] | None = None, scale_factor: Factor = None, mode: str = "nearest",
                align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
                antialias: bool = False) -> Tensor:
    """x (N, C, L), (N, C, H, W) or (N, C, D, H, W) with its last dims of another `size`, or `scale_factor` times theirs.

    `mode`: "nearest" (as OpenCV, for old models), "nearest-exact", "area" (means), for any number of dims; "linear" for one,
    "bilinear" and "bicubic" (Keys 1981, a = -0.75) for two, "trilinear" for three. `align_corners`: the first and last values
    stay where they are; else values are the middles of pixels. `antialias` (bilinear and bicubic, a = -0.5) widens the filter
    where the result is smaller. `recompute_scale_factor` computes positions from the sizes alone, not from `scale_factor`.
    ShapeError where these do not fit each other or x.
    """
    dims = len(x.shape) - 2
    if dims not in LAYOUTS:
        raise ShapeError(f"interpolate: the input has shape {tuple(x.shape)}, expected {', '.join(LAYOUTS.values())}")
    _check_mode(mode, dims, align_corners, antialias)
    sizes, factors = _sizes(x, dims, size, scale_factor)
    if recompute_scale_factor:
        if scale_factor is None:
            raise ShapeError("interpolate: recompute_scale_factor wants a scale_factor, found a size; leave one of them out")
        factors = [None] * dims
    result = x if isinstance(x, Tensor) else Tensor(x)
    order = sorted(range(dims), key=lambda i: (sizes[i] / x.shape[2 + i] >= 1, -i if sizes[i] >= x.shape[2 + i] else i))
    made = _antialiased if antialias else _MODES[mode]
    for i in order:                               # smaller ones first; growing ones from the last dim, where a map costs most
        result = Resample.apply(result, taps=made(x.shape[2 + i], sizes[i], factors[i], mode, bool(align_corners)), dim=2 + i)
    return result


def _check_mode(mode: str, dims: int, align_corners: bool | None, antialias: bool) -> None:
    if mode not in _MODES:
        raise ShapeError(f'interpolate: mode is "{mode}", expected one of {", ".join(_MODES)}')
    wanted = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}.get(mode)
    if wanted not in (None, dims):
        raise ShapeError(f'interpolate: mode "{mode}" wants {LAYOUTS[wanted]}, found {dims + 2} dims')
    if align_corners is not None and wanted is None:
        raise ShapeError(f'interpolate: align_corners has no meaning in mode "{mode}"; leave it out')
    if antialias and (mode not in ("bilinear", "bicubic")):
        raise ShapeError(f'interpolate: antialias is for the modes bilinear and bicubic, not for "{mode}"')


def _sizes(x: Any, dims: int, size: Any, scale_factor: Any) -> tuple[list[int], list[Any]]:
    if (size is None) == (scale_factor is None):
        raise ShapeError("interpolate: wants either a size or a scale_factor")
    given = size if size is not None else scale_factor
    values = [given] * dims if isinstance(given, int | float | np.number) else list(given)
    if len(values) != dims:
        raise ShapeError(f"interpolate: {len(values)} sizes or factors {given} for the {dims} dims after N, C of "
                         f"{tuple(x.shape)}")
    factors = [None] * dims if size is not None else [float(v) for v in values]
    sizes = [int(v) for v in values] if size is not None else [
        math.floor(n * v) if 0 < v < math.inf else 0 for n, v in zip(x.shape[2:], values)]
    if min(sizes) < 1 or min(x.shape[2:]) < 1:
        raise ShapeError(f"interpolate: an input of {tuple(x.shape)} to the size {tuple(sizes)}; both must be at least 1")
    return sizes, factors


@lru_cache(256)
def _nearest(n: int, out: int, factor: float | None, mode: str, align: bool) -> Taps:
    """In float32, as PyTorch counts: other roundings would choose other pixels."""
    step = np.float32(1 / factor) if factor is not None else np.float32(n) / np.float32(out)
    places = np.arange(out, dtype=np.float32)
    if mode == "nearest-exact":
        places = places + np.float32(0.5)
    elif out == n:
        return Taps.of_rows(n, np.arange(n))
    elif out == 2 * n:
        return Taps.of_rows(n, np.arange(out) // 2)
    return Taps.of_rows(n, np.minimum(np.floor(places * step).astype(np.int64), n - 1))


def _positions(n: int, out: int, factor: float | None, align: bool) -> Array:
    if align:
        return np.arange(out) * ((n - 1) / (out - 1) if out > 1 else 0.0)
    return (np.arange(out) + 0.5) * (1 / factor if factor is not None else n / out) - 0.5


@lru_cache(256)
def _linear(n: int, out: int, factor: float | None, mode: str, align: bool) -> Taps:
    if out == n:
        return Taps.of_rows(n, np.arange(n))
    places = np.maximum(_positions(n, out, factor, align), 0)
    left = np.minimum(places.astype(np.int64), n - 1)
    share = np.clip(places - left, 0, 1)
    return Taps.of_rows(n, np.stack([left, np.minimum(left + 1, n - 1)], 1), np.stack([1 - share, share], 1))


@lru_cache(256)
def _cubic(n: int, out: int, factor: float | None, mode: str, align: bool) -> Taps:
    places = _positions(n, out, factor, align)
    left = np.floor(places)
    index = np.clip(left[:, None].astype(np.int64) + np.arange(-1, 3), 0, n - 1)
    return Taps.of_rows(n, index, keys_filter((places - left)[:, None] - np.arange(-1, 3), -0.75))


def keys_filter(distance: Any, a: float) -> Any:
    """The cubic convolution filter of Keys (1981)."""
    d = np.abs(distance)
    return np.where(d <= 1, ((a + 2) * d - (a + 3)) * d * d + 1, np.where(d < 2, ((d - 5) * d + 8) * d * a - 4 * a, 0.0))


@lru_cache(256)
def _area(n: int, out: int, factor: float | None, mode: str, align: bool) -> Taps:
    return Taps.means(n, [j * n // out for j in range(out)], [-(-(j + 1) * n // out) for j in range(out)])


@lru_cache(256)
def _antialiased(n: int, out: int, factor: float | None, mode: str, align: bool) -> Taps:
    """The filter is as wide as `step` pixels ask for, and its weights add up to 1."""
    if align:
        step = (n - 1) / (out - 1) if out > 1 else 0.0
    else:
        step = 1 / factor if factor is not None else n / out
    wide, reach = max(step, 1.0), 1 if mode == "bilinear" else 2
    middles = step * (np.arange(out) + 0.5)
    first = np.maximum((middles - reach * wide + 0.5).astype(np.int64), 0)
    last = np.minimum((middles + reach * wide + 0.5).astype(np.int64), n)
    counts = last - first
    rows = np.repeat(np.arange(out), counts)
    index = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + first[rows]
    distance = (index - middles[rows] + 0.5) / wide
    weight = np.maximum(1 - np.abs(distance), 0) if mode == "bilinear" else keys_filter(distance, -0.5)
    total = np.bincount(rows, weight, out)
    return Taps(n, counts, index, weight / total[rows])


_MODES: dict[str, Callable[..., Taps]] = {"nearest": _nearest, "nearest-exact": _nearest, "area": _area, "linear": _linear,
                                          "bilinear": _linear, "trilinear": _linear, "bicubic": _cubic}
