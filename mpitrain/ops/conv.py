"""Convolutions of images (N, C, H, W), and their transposes: one is the adjoint of the other."""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels.convolution import Pair, Window, channel_sums, convolve, convolve_adjoint, kernel_gradient

__all__ = ["conv2d", "conv_transpose2d"]


def conv2d(x: Any, weight: Any, bias: Any = None, *, stride: int | Pair = 1, padding: int | Pair = 0,
           dilation: int | Pair = 1, groups: int = 1) -> Tensor:
    """Cross-correlation of x (N, C, H, W) with weight (O, C/groups, kh, kw), plus bias (O,): (N, O, OH, OW).

    Raises ShapeError where the channels do not fit, or the window is larger than the padded image.
    """
    window = _window("conv2d", weight, stride, padding, dilation)
    _check("conv2d", x, weight, bias, groups, channels=weight.shape[1] * groups, outputs=weight.shape[0])
    if min(window.outputs(*x.shape[2:])) < 1:
        raise ShapeError(f"conv2d: the window {window.kernel} with dilation {window.dilation} does not fit into images of "
                         f"{x.shape[2]}x{x.shape[3]} with padding {window.padding}; make it smaller or pad more")
    return Conv2d.apply(x, weight, bias, window=window, groups=groups)


def conv_transpose2d(x: Any, weight: Any, bias: Any = None, *, stride: int | Pair = 1, padding: int | Pair = 0,
                     output_padding: int | Pair = 0, dilation: int | Pair = 1, groups: int = 1) -> Tensor:
    """The adjoint of conv2d, with x (N, C, H, W), weight (C, O/groups, kh, kw) and bias (O,): (N, O, OH, OW).

    `output_padding` adds rows and columns at the end, since several image sizes have a convolution of the same size.
    Raises ShapeError where the channels do not fit, or nothing would come out.
    """
    window = _window("conv_transpose2d", weight, stride, padding, dilation)
    _check("conv_transpose2d", x, weight, bias, groups, channels=weight.shape[0], outputs=weight.shape[1] * groups)
    extra = pair(output_padding)
    if not all(0 <= e < s for e, s in zip(extra, window.stride)):
        raise ShapeError(f"conv_transpose2d: output_padding is {extra}; it must be smaller than the stride {window.stride}")
    size = tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 + e for n, k, s, p, d, e in zip(x.shape[2:], *window, extra))
    if min(size) < 1:
        raise ShapeError(f"conv_transpose2d: images of {x.shape[2]}x{x.shape[3]} with padding {window.padding} "
                         f"would give {size[0]}x{size[1]}; pad less")
    return ConvTranspose2d.apply(x, weight, bias, window=window, groups=groups, size=size)


class Conv2d(Function):
    """y = w * windows(x) + b."""

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array, bias: Array | None, *, window: Window, groups: int) -> Array:
        ctx.save(x, weight)
        ctx.window, ctx.groups = window, groups
        return convolve(x, weight, bias, window, groups)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, ...]:
        x, weight = ctx.saved
        return (convolve_adjoint(grad, weight, None, ctx.window, ctx.groups, x.shape[2:]) if ctx.needs[0] else None,
                *_parameter_gradients(ctx, x, grad, "y"))


class ConvTranspose2d(Function):
    """The adjoint of Conv2d's linear map, plus b."""

    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array, bias: Array | None, *, window: Window, groups: int,
                size: Pair) -> Array:
        ctx.save(x, weight)
        ctx.window, ctx.groups = window, groups
        return convolve_adjoint(x, weight, bias, window, groups, size)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, ...]:
        x, weight = ctx.saved
        return (convolve(grad, weight, None, ctx.window, ctx.groups) if ctx.needs[0] else None,
                *_parameter_gradients(ctx, grad, x, "x"))


def _parameter_gradients(ctx: Context, x: Array, y: Array, bias_of: str) -> tuple[Array | None, Array | None]:
    """The gradients of weight and bias, in one pass where both are wanted; the bias is added to `bias_of`."""
    if ctx.needs[1]:
        weight, bias = kernel_gradient(x, y, ctx.window, ctx.groups, ctx.out(1), bias_of if ctx.needs[2] else "")
        return weight, bias
    return None, channel_sums(x if bias_of == "x" else y) if ctx.needs[2] else None


def pair(value: int | Pair) -> Pair:
    if isinstance(value, int):
        return value, value
    if not isinstance(value, tuple | list) or len(value) != 2 or not all(isinstance(number, int) for number in value):
        raise ShapeError(f"expected an integer for y and x, or two of them, found {value!r}")
    return value[0], value[1]


def check_images(name: str, x: Any) -> None:
    if len(x.shape) != 4:
        raise ShapeError(f"{name}: the input has shape {x.shape}, expected (N, C, H, W)")


def _window(name: str, weight: Any, stride: int | Pair, padding: int | Pair, dilation: int | Pair) -> Window:
    if len(weight.shape) != 4:
        raise ShapeError(f"{name}: the weight has shape {weight.shape}, expected 4 dims")
    window = Window((weight.shape[2], weight.shape[3]), pair(stride), pair(padding), pair(dilation))
    if min(window.kernel) < 1 or min(window.stride) < 1 or min(window.dilation) < 1 or min(window.padding) < 0:
        raise ShapeError(f"{name}: kernel {window.kernel}, stride {window.stride} and dilation {window.dilation} must be at "
                         f"least 1, padding {window.padding} at least 0")
    return window


def _check(name: str, x: Any, weight: Any, bias: Any, groups: int, *, channels: int, outputs: int) -> None:
    check_images(name, x)
    if groups < 1 or channels % groups or outputs % groups:
        raise ShapeError(f"{name}: {channels} input and {outputs} output channels cannot be split into {groups} groups")
    if x.shape[1] != channels:
        raise ShapeError(f"{name}: the input has {x.shape[1]} channels, the weight {weight.shape} with groups={groups} "
                         f"expects {channels}")
    if bias is not None and tuple(bias.shape) != (outputs,):
        raise ShapeError(f"{name}: the bias has shape {tuple(bias.shape)}, expected ({outputs},)")
