"""Pools of series (N, C, L) and volumes (N, C, D, H, W), of powers, and what undoes a max pool; all take inputs without N too."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.ops.elementwise import power
from mpitrain.ops.geometry import Numbers, check_input, numbers
from mpitrain.ops.index import getitem
from mpitrain.ops.pool import avg_pool2d, max_pooled, mean_pooled
from mpitrain.ops.shape import reshape
from mpitrain.ops.spans import Sizes, Spans

__all__ = ["adaptive_avg_pool1d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool3d", "avg_pool1d", "avg_pool3d",
           "lp_pool1d", "lp_pool2d", "lp_pool3d", "max_pool1d", "max_pool3d", "max_unpool1d", "max_unpool2d", "max_unpool3d"]


def max_pool1d(x: Any, kernel_size: Numbers, stride: Numbers | None = None, padding: Numbers = 0, dilation: Numbers = 1,
               ceil_mode: bool = False, return_indices: bool = False) -> Any:
    """The largest value of each window of x (N, C, L); otherwise as `max_pool2d`."""
    spans = Spans.of("max_pool1d", 1, x, kernel_size, stride, padding, dilation, ceil_mode)
    return max_pooled("max_pool1d", 1, x, spans, return_indices)


def max_pool3d(x: Any, kernel_size: Numbers, stride: Numbers | None = None, padding: Numbers = 0, dilation: Numbers = 1,
               ceil_mode: bool = False, return_indices: bool = False) -> Any:
    """The largest value of each window of x (N, C, D, H, W); otherwise as `max_pool2d`."""
    spans = Spans.of("max_pool3d", 3, x, kernel_size, stride, padding, dilation, ceil_mode)
    return max_pooled("max_pool3d", 3, x, spans, return_indices)


def avg_pool1d(x: Any, kernel_size: Numbers, stride: Numbers | None = None, padding: Numbers = 0, ceil_mode: bool = False,
               count_include_pad: bool = True) -> Tensor:
    """The mean of each window of x (N, C, L); otherwise as `avg_pool2d`."""
    spans = Spans.of("avg_pool1d", 1, x, kernel_size, stride, padding, 1, ceil_mode)
    return mean_pooled("avg_pool1d", 1, x, spans, count_include_pad, None)


def avg_pool3d(x: Any, kernel_size: Numbers, stride: Numbers | None = None, padding: Numbers = 0, ceil_mode: bool = False,
               count_include_pad: bool = True, divisor_override: int | None = None) -> Tensor:
    """The mean of each window of x (N, C, D, H, W); otherwise as `avg_pool2d`."""
    spans = Spans.of("avg_pool3d", 3, x, kernel_size, stride, padding, 1, ceil_mode)
    return mean_pooled("avg_pool3d", 3, x, spans, count_include_pad, divisor_override)


def adaptive_max_pool1d(x: Any, output_size: Sizes, return_indices: bool = False) -> Any:
    """The largest value of windows that cut a series into `output_size` parts, as equal as can be."""
    return max_pooled("adaptive_max_pool1d", 1, x, Spans.adaptive("adaptive_max_pool1d", 1, x, output_size), return_indices)


def adaptive_max_pool3d(x: Any, output_size: Sizes, return_indices: bool = False) -> Any:
    """The largest value of windows that cut a volume into `output_size` parts, as equal as can be; None keeps a dim."""
    return max_pooled("adaptive_max_pool3d", 3, x, Spans.adaptive("adaptive_max_pool3d", 3, x, output_size), return_indices)


def adaptive_avg_pool1d(x: Any, output_size: Sizes) -> Tensor:
    """The mean of windows that cut a series into `output_size` parts, as equal as can be."""
    return mean_pooled("adaptive_avg_pool1d", 1, x, Spans.adaptive("adaptive_avg_pool1d", 1, x, output_size), False, None)


def adaptive_avg_pool3d(x: Any, output_size: Sizes) -> Tensor:
    """The mean of windows that cut a volume into `output_size` parts, as equal as can be; None keeps a dim."""
    return mean_pooled("adaptive_avg_pool3d", 3, x, Spans.adaptive("adaptive_avg_pool3d", 3, x, output_size), False, None)


def lp_pool1d(x: Any, norm_type: float, kernel_size: Numbers, stride: Numbers | None = None, ceil_mode: bool = False) -> Tensor:
    """(sum of x ** norm_type over each window) ** (1 / norm_type), of x (N, C, L)."""
    return _powers(avg_pool1d, 1, x, norm_type, kernel_size, stride, ceil_mode)


def lp_pool2d(x: Any, norm_type: float, kernel_size: Numbers, stride: Numbers | None = None, ceil_mode: bool = False) -> Tensor:
    """(sum of x ** norm_type over each window) ** (1 / norm_type), of x (N, C, H, W)."""
    return _powers(avg_pool2d, 2, x, norm_type, kernel_size, stride, ceil_mode)


def lp_pool3d(x: Any, norm_type: float, kernel_size: Numbers, stride: Numbers | None = None, ceil_mode: bool = False) -> Tensor:
    """(sum of x ** norm_type over each window) ** (1 / norm_type), of x (N, C, D, H, W)."""
    return _powers(avg_pool3d, 3, x, norm_type, kernel_size, stride, ceil_mode)


def _powers(means: Any, dims: int, x: Any, norm: float, kernel: Numbers, stride: Numbers | None, ceil_mode: bool) -> Tensor:
    from mpitrain.ops.activation import relu
    area = prod(numbers(f"lp_pool{dims}d", "kernel_size", kernel, dims))
    mean = means(power(x, norm), kernel, stride, 0, ceil_mode)
    return power(relu(mean) * area, 1 / norm)     # an odd power may have a negative sum, which PyTorch makes 0 too


def max_unpool1d(x: Any, indices: Any, kernel_size: Numbers, stride: Numbers | None = None, padding: Numbers = 0,
                 output_size: Sequence[int] | None = None) -> Tensor:
    """A series with the values x at the places `indices` of a max pool, and 0 elsewhere; `output_size` where several fit."""
    return _unpool("max_unpool1d", 1, x, indices, kernel_size, stride, padding, output_size)


def max_unpool2d(x: Any, indices: Any, kernel_size: Numbers, stride: Numbers | None = None, padding: Numbers = 0,
                 output_size: Sequence[int] | None = None) -> Tensor:
    """Images with the values x at the places `indices` of a max pool, and 0 elsewhere; `output_size` where several fit."""
    return _unpool("max_unpool2d", 2, x, indices, kernel_size, stride, padding, output_size)


def max_unpool3d(x: Any, indices: Any, kernel_size: Numbers, stride: Numbers | None = None, padding: Numbers = 0,
                 output_size: Sequence[int] | None = None) -> Tensor:
    """Volumes with the values x at the places `indices` of a max pool, and 0 elsewhere; `output_size` where several fit."""
    return _unpool("max_unpool3d", 3, x, indices, kernel_size, stride, padding, output_size)


def _unpool(name: str, dims: int, x: Any, indices: Any, kernel: Numbers, stride: Numbers | None, padding: Numbers,
            size: Sequence[int] | None) -> Tensor:
    check_input(name, x, dims, batch=False)
    indices = getattr(indices, "array", indices)
    if tuple(indices.shape) != tuple(x.shape) or indices.dtype.kind not in "iu":
        raise ShapeError(f"{name}: indices are {indices.dtype} of shape {tuple(indices.shape)}, expected integers of the input's "
                         f"shape {tuple(x.shape)}")
    kernels = numbers(name, "kernel_size", kernel, dims)
    strides = kernels if stride is None else numbers(name, "stride", stride, dims)
    if size is None:
        shape = tuple((n - 1) * s - 2 * p + k for n, k, s, p in zip(
            x.shape[-dims:], kernels, strides, numbers(name, "padding", padding, dims, 0)))
    else:
        shape = numbers(name, "output_size", tuple(size)[-dims:], dims)
    area = prod(shape)
    if min(shape) < 1 or (indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < area):
        raise ShapeError(f"{name}: indices are {int(indices.min())} ... {int(indices.max())}, expected places in an output of "
                         f"{shape}; give the output_size that the pool began with")
    planes = prod(x.shape[:-dims])
    y = Unpool.apply(reshape(x, (planes, prod(x.shape[-dims:]))), indices.reshape(planes, -1), size=area)
    return reshape(y, (*x.shape[:-dims], *shape))


class Unpool(Function):
    """(P, size) with the values of x (P, O) at `places` (P, O)."""

    @staticmethod
    def forward(ctx: Context, x: Array, places: Array, *, size: int) -> Array:
        ctx.save(places)
        result = ctx.xp.zeros((len(x), size), x.dtype)
        result[ctx.xp.arange(len(x))[:, None], places] = x
        return result

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        places, = ctx.saved
        return getitem(grad, (ctx.xp.arange(len(places))[:, None], places)), None
