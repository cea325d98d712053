"""Pooling of images (N, C, H, W): the largest or the mean value of each window, or one of its pixels."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels import pool
from mpitrain.kernels.pool import Side
from mpitrain.ops.conv import check_images
from mpitrain.ops.geometry import Numbers
from mpitrain.ops.index import getitem
from mpitrain.ops.shape import reshape
from mpitrain.ops.spans import ONE, Counts, Sizes, Spans, each

__all__ = ["adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "max_pool2d", "subsample2d"]

Windows: TypeAlias = tuple[Side, tuple[int, ...]]         # along one dim, and by how many numbers the sum of each is divided


def max_pool2d(x: Any, kernel_size: Numbers, stride: Numbers | None = None, padding: Numbers = 0, dilation: Numbers = 1,
               ceil_mode: bool = False, return_indices: bool = False, *, relu: bool = False) -> Any:
    """The largest value of each window of x (N, C, H, W), or (C, H, W); `stride` is the kernel's size by default.

    Padding never wins. With `ceil_mode` a last window may reach beyond the padding. With `return_indices` the result is a pair
    with the places of the values in their plane, h W + w, int64: what `max_unpool2d` wants. With `relu`, 0 where the value is
    negative: what ReLU before or after the pooling gives, to the bit, gradients too. Raises ShapeError where no window fits, or
    padding is more than half of the kernel.
    """
    if relu and return_indices:
        raise ShapeError("max_pool2d: relu with return_indices: a value that ReLU made 0 has no place; leave one of them out")
    return max_pooled("max_pool2d", 2, x, Spans.of("max_pool2d", 2, x, kernel_size, stride, padding, dilation, ceil_mode),
                      return_indices, relu)


def avg_pool2d(x: Any, kernel_size: Numbers, stride: Numbers | None = None, padding: Numbers = 0, ceil_mode: bool = False,
               count_include_pad: bool = True, divisor_override: int | None = None) -> Tensor:
    """The mean of each window of x (N, C, H, W), or (C, H, W); padding counts as zeros, or not at all without
    `count_include_pad`. `divisor_override` is what sums are divided by instead. Raises ShapeError as `max_pool2d` does."""
    spans = Spans.of("avg_pool2d", 2, x, kernel_size, stride, padding, 1, ceil_mode)
    return mean_pooled("avg_pool2d", 2, x, spans, count_include_pad, divisor_override)


def adaptive_max_pool2d(x: Any, output_size: Sizes, return_indices: bool = False) -> Any:
    """The largest value of windows that cut an image into `output_size` parts, as equal as can be; None keeps a dim."""
    return max_pooled("adaptive_max_pool2d", 2, x, Spans.adaptive("adaptive_max_pool2d", 2, x, output_size), return_indices)


def adaptive_avg_pool2d(x: Any, output_size: Sizes) -> Tensor:
    """The mean of windows that cut an image into `output_size` parts, as equal as can be; size 1 is the mean of the image."""
    return mean_pooled("adaptive_avg_pool2d", 2, x, Spans.adaptive("adaptive_avg_pool2d", 2, x, output_size), False, None)


def subsample2d(x: Any, stride: int, channels: tuple[int, int] = (0, 0)) -> Tensor:
    """Every `stride`-th pixel in y and x, and channels of zeros: so many before and after those of x.

    A residual block's way around where its shape changes, without parameters: He et al. 2016a, option A.
    """
    check_images("subsample2d", x)
    if stride < 1 or min(channels) < 0:
        raise ShapeError(f"subsample2d: the stride is {stride}, expected at least 1; the channels to add are {channels}, "
                         "expected two numbers of at least 0")
    return Subsample.apply(x, stride=stride, before=channels[0], after=channels[1])


def max_pooled(name: str, dims: int, x: Any, spans: Spans, return_indices: bool, relu: bool = False) -> Any:
    """Maxima over windows of the last dims; of volumes first in each plane, then along the depth: the first of equals wins in
    both, as it does in all dims at once."""
    if min(x.shape[-dims:]) < 1:
        raise ShapeError(f"{name}: an input of {tuple(x.shape[-dims:])} has no largest value; it must be at least 1 in each dim")
    if return_indices or not spans.plain:
        places = spans.places(x)
        planes = reshape(x, (prod(x.shape[:-dims]), prod(x.shape[-dims:])))
        rows = places.reshape(len(planes), -1)
        found = reshape(getitem(planes, (planes.xp.arange(len(planes))[:, None], rows)), places.shape)
        return (found, Tensor(places)) if return_indices else found
    def largest(x: Any, rows: Windows, columns: Windows) -> Tensor:
        return MaxPool.apply(x, rows=rows[0], columns=columns[0], relu=relu)
    return _by_planes(largest, dims, x, [(side, ()) for side in spans.sides])


def mean_pooled(name: str, dims: int, x: Any, spans: Spans, include_padding: bool, divisor: int | None) -> Tensor:
    """Means over windows of the last dims; of volumes first in each plane, then along the depth."""
    if divisor == 0:
        raise ShapeError(f"{name}: divisor_override is 0, expected another integer")
    counts = spans.counts(include_padding)
    if divisor is not None:
        counts = [(1,) * n for n in spans.outputs[:-1]] + [(divisor,) * spans.outputs[-1]]

    def mean(x: Any, rows: Windows, columns: Windows) -> Tensor:
        return MeanPool.apply(x, rows=rows[0], columns=columns[0], counts=(rows[1], columns[1]))
    return _by_planes(mean, dims, x, list(zip(spans.sides, counts)))


def _by_planes(pool: Callable[[Any, Windows, Windows], Tensor], dims: int, x: Any, windows: list[Windows]) -> Tensor:
    """`pool`, of images (N, C, H, W), over windows of the last dims of any x: a line is an image of one row, and of a volume each
    plane is pooled first, and then the depth."""
    if dims == 2 and len(x.shape) == 4:
        return pool(x, *windows)
    outer, outputs = x.shape[:-dims], tuple(side.count for side, _ in windows)
    if dims == 1:
        y = pool(reshape(x, (1, prod(outer), 1, x.shape[-1])), (ONE, (1,)), windows[0])
    else:
        y = pool(reshape(x, (1, prod(x.shape[:-2]), *x.shape[-2:])), *windows[-2:])
    if dims == 3:
        area = prod(outputs[1:])
        y = pool(reshape(y, (1, prod(outer), x.shape[-3], area)), windows[0], (each(area), (1,) * area))
    return reshape(y, (*outer, *outputs))


class MaxPool(Function):
    """The largest value of each window, or 0 where there is `relu`; its gradient goes to the first place where it stands."""

    half = "own"
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

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Placed.apply(grad, ctx.saved[0], windows=ctx.windows)


class Placed(Function):
    """The values at the places in their planes that a max pool found, 0 elsewhere: its adjoint."""

    half = "own"

    @staticmethod
    def forward(ctx: Context, x: Array, where: Array, *, windows: tuple[Side, Side]) -> Array:
        ctx.save(where)
        ctx.windows = windows
        return pool.window_maximum_gradient(x, where, *windows)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return Picked.apply(grad, ctx.saved[0], windows=ctx.windows), None


class Picked(Function):
    """The values that stand where a max pool found its own, 0 where ReLU made that 0."""

    half = "own"

    @staticmethod
    def forward(ctx: Context, x: Array, where: Array, *, windows: tuple[Side, Side]) -> Array:
        ctx.save(where)
        ctx.windows, xp = windows, ctx.xp
        planes = x.reshape(*x.shape[:2], -1)
        found = xp.take_along_axis(planes, xp.maximum(where, 0).reshape(*x.shape[:2], -1), axis=2).reshape(where.shape)
        return xp.where(where < 0, x.dtype.type(0), found)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        return Placed.apply(grad, ctx.saved[0], windows=ctx.windows), None


class MeanPool(Function):
    """The sum of each window, divided by the product of the numbers that `counts` has for its row and its column."""

    half = "own"
    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, *, rows: Side, columns: Side, counts: Counts) -> Array:
        ctx.windows, ctx.area = (rows, columns), _areas(counts, x, ctx.xp)
        ctx.counts = counts
        total: Array = pool.window_total(x, rows, columns)
        total /= ctx.area
        return total

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return pool.window_total_gradient(grad / ctx.area, *ctx.windows)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Spread.apply(grad, windows=ctx.windows, counts=ctx.counts)


class Spread(Function):
    """The adjoint of MeanPool: each value, divided, is added all over its window."""

    half = "own"

    @staticmethod
    def forward(ctx: Context, x: Array, *, windows: tuple[Side, Side], counts: Counts) -> Array:
        ctx.windows, ctx.counts = windows, counts
        return pool.window_total_gradient(x / _areas(counts, x, ctx.xp), *windows)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return MeanPool.apply(grad, rows=ctx.windows[0], columns=ctx.windows[1], counts=ctx.counts)


class Subsample(Function):
    """Pixels stride apart, between channels of zeros."""

    half = "own"
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

    half = "own"

    @staticmethod
    def forward(ctx: Context, x: Array, *, shape: tuple[int, ...], stride: int, before: int) -> Array:
        ctx.stride, ctx.before, ctx.after = stride, before, x.shape[1] - shape[1] - before
        return pool.subsample_gradient(x, shape, stride, before)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return Subsample.apply(grad, stride=ctx.stride, before=ctx.before, after=ctx.after)


def _areas(counts: Counts, x: Array, xp: Any) -> Any:
    """The area of each window; one number where all are equal."""
    heights, widths = counts
    if len(set(heights)) == 1 == len(set(widths)):
        return heights[0] * widths[0]
    return xp.asarray(heights, dtype=x.dtype)[:, None] * xp.asarray(widths, dtype=x.dtype)
