"""Pooling of images (N, C, H, W): the largest or the mean value of each window, or one of its pixels."""

from __future__ import annotations

from functools import cache
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels import pool
from mpitrain.kernels.convolution import Pair
from mpitrain.kernels.pool import Side
from mpitrain.ops.conv import check_images, pair

__all__ = ["adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "max_pool2d", "subsample2d"]


def max_pool2d(x: Any, kernel: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0, *,
               relu: bool = False) -> Tensor:
    """The largest value of each window; `stride` is the kernel's size by default, padding never wins.

    With `relu`, 0 where that is negative: what ReLU before or after the pooling gives, to the bit, gradients too.

    Raises ShapeError where no window fits, or padding is more than half of the kernel.
    """
    rows, columns = _fixed("max_pool2d", x, kernel, stride, padding)[:2]
    return MaxPool.apply(x, rows=rows, columns=columns, relu=relu)


def avg_pool2d(x: Any, kernel: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0, *,
               count_include_pad: bool = True) -> Tensor:
    """The mean of each window; padding counts as zeros, or not at all without `count_include_pad`.

    Raises ShapeError as `max_pool2d` does.
    """
    rows, columns, area = _fixed("avg_pool2d", x, kernel, stride, padding)
    return MeanPool.apply(x, rows=rows, columns=columns, area=area if count_include_pad else None)


def adaptive_max_pool2d(x: Any, size: int | Pair) -> Tensor:
    """The largest value of windows that cut an image into `size` parts, as equal as can be."""
    rows, columns = _adaptive("adaptive_max_pool2d", x, size)
    return MaxPool.apply(x, rows=rows, columns=columns)


def adaptive_avg_pool2d(x: Any, size: int | Pair) -> Tensor:
    """The mean of windows that cut an image into `size` parts, as equal as can be; size 1 is the mean of the image."""
    rows, columns = _adaptive("adaptive_avg_pool2d", x, size)
    return MeanPool.apply(x, rows=rows, columns=columns, area=None)


def subsample2d(x: Any, stride: int, channels: tuple[int, int] = (0, 0)) -> Tensor:
    """Every `stride`-th pixel in y and x, and channels of zeros: so many before and after those of x.

    A residual block's way around where its shape changes, without parameters: He et al. 2016a, option A.
    """
    check_images("subsample2d", x)
    if stride < 1 or min(channels) < 0:
        raise ShapeError(f"subsample2d: the stride is {stride}, expected at least 1; the channels to add are {channels}, "
                         "expected two numbers of at least 0")
    return Subsample.apply(x, stride=stride, before=channels[0], after=channels[1])


class MaxPool(Function):
    """The largest value of each window, or 0 where there is `relu`; its gradient goes to the first place where it stands."""

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, *, rows: Side, columns: Side, relu: bool = False) -> Array:
        largest, where = pool.window_maximum(x, rows, columns, relu)
        ctx.save(where)
        ctx.windows = rows, columns
        return largest

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return pool.window_maximum_gradient(grad, *ctx.saved, *ctx.windows)


class MeanPool(Function):
    """The sum of each window, divided by `area`, or by the number of its pixels where that is None."""

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, *, rows: Side, columns: Side, area: int | None) -> Array:
        ctx.windows = rows, columns
        ctx.area = area or _areas(rows, columns, x, ctx.xp)
        total: Array = pool.window_total(x, rows, columns)
        total /= ctx.area
        return total

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return pool.window_total_gradient(grad / ctx.area, *ctx.windows)


class Subsample(Function):
    """Pixels stride apart, between channels of zeros."""

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, *, stride: int, before: int, after: int) -> Array:
        ctx.shape, ctx.stride, ctx.before = x.shape, stride, before
        return pool.subsample(x, stride, before, after)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return pool.subsample_gradient(grad, ctx.shape, ctx.stride, ctx.before)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Scattered.apply(grad, shape=ctx.shape, stride=ctx.stride, before=ctx.before)


class Scattered(Function):
    """The adjoint of Subsample: pixels stride apart among zeros, without the channels that it added."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, shape: tuple[int, ...], stride: int, before: int) -> Array:
        ctx.stride, ctx.before, ctx.after = stride, before, x.shape[1] - shape[1] - before
        return pool.subsample_gradient(x, shape, stride, before)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Subsample.apply(grad, stride=ctx.stride, before=ctx.before, after=ctx.after)


def _areas(rows: Side, columns: Side, x: Array, xp: Any) -> Any:
    """The area of each window; one number where all are equal."""
    if rows.narrowest == rows.widest and columns.narrowest == columns.widest:
        return rows.widest * columns.widest
    heights, widths = ([b - a for a, b in zip(side.starts, side.stops)] for side in (rows, columns))
    return xp.asarray(heights, dtype=x.dtype)[:, None] * xp.asarray(widths, dtype=x.dtype)


def _fixed(name: str, x: Any, kernel: int | Pair, stride: int | Pair | None, padding: int | Pair) -> tuple[Side, Side, int]:
    """The windows in y and x, and the area of a window that is not cut off."""
    check_images(name, x)
    sizes = pair(kernel)
    strides, paddings = sizes if stride is None else pair(stride), pair(padding)
    sides = []
    for size, k, s, p in zip(x.shape[2:], sizes, strides, paddings):
        if k < 1 or s < 1 or not 0 <= p <= k // 2:
            raise ShapeError(f"{name}: kernel {sizes} and stride {strides} must be at least 1, padding {paddings} between 0 "
                             "and half of the kernel")
        if size + 2 * p < k:
            raise ShapeError(f"{name}: the window {sizes} does not fit into images of {x.shape[2]}x{x.shape[3]} with padding "
                             f"{paddings}; make it smaller or pad more")
        sides.append(_windows(size, k, s, p))
    return sides[0], sides[1], sizes[0] * sizes[1]


@cache
def _windows(size: int, kernel: int, stride: int, padding: int) -> Side:
    starts = [i * stride - padding for i in range((size + 2 * padding - kernel) // stride + 1)]
    return Side(tuple(max(a, 0) for a in starts), tuple(min(a + kernel, size) for a in starts), size)


def _adaptive(name: str, x: Any, size: int | Pair) -> tuple[Side, Side]:
    check_images(name, x)
    counts = pair(size)
    if min(counts) < 1 or min(x.shape[2:]) < 1:
        raise ShapeError(f"{name}: images of {x.shape[2]}x{x.shape[3]} cannot be cut into {counts} parts; both must be at "
                         "least 1x1")
    return _parts(x.shape[2], counts[0]), _parts(x.shape[3], counts[1])


@cache
def _parts(size: int, count: int) -> Side:
    return Side(tuple(i * size // count for i in range(count)), tuple(-(-(i + 1) * size // count) for i in range(count)), size)
