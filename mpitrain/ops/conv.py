"""Convolutions of images (N, C, H, W), and their transposes: one is the adjoint of the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels.convolution import Pair, Window, channel_sums, convolve, convolve_adjoint, kernel_gradient
from mpitrain.ops.geometry import Numbers, Padding, check_channels, check_input, check_weight, numbers, padding_by_name
from mpitrain.ops.linalg import operands_of
from mpitrain.ops.shape import expand_dims, pad, reshape

__all__ = ["conv2d", "conv_transpose2d"]


def conv2d(x: Any, weight: Any, bias: Any = None, stride: Numbers = 1, padding: Padding = 0, dilation: Numbers = 1,
           groups: int = 1, *, operands: str | None = None) -> Tensor:
    """Cross-correlation of x (N, C, H, W) with weight (O, C/groups, kh, kw), plus bias (O,): (N, O, OH, OW).

    x may come without N. `padding` is zeros on both sides, or "same" (with a stride of 1: OH = H; where that is odd, one zero
    more at the end), or "valid": none. `operands` is the format that the products round to, by default the weight's. Raises
    ShapeError where the channels do not fit, or the window is larger than the padded image.
    """
    if len(x.shape) == 3:
        return _first(conv2d(expand_dims(x, 0), weight, bias, stride, padding, dilation, groups, operands=operands))
    check_input("conv2d", x, 2)
    if isinstance(padding, str):
        check_weight("conv2d", weight, 2)
        steps, apart = numbers("conv2d", "stride", stride, 2), numbers("conv2d", "dilation", dilation, 2)
        padding, more = padding_by_name("conv2d", padding, weight.shape[2:], steps, apart)
        x = pad(x, [(0, 0), (0, 0), (0, more[0]), (0, more[1])]) if any(more) else x
    window = _window("conv2d", weight, stride, padding, dilation)
    check_channels("conv2d", x, weight, bias, groups, channels=weight.shape[1] * groups, outputs=weight.shape[0])
    if min(window.outputs(*x.shape[2:])) < 1:
        raise ShapeError(f"conv2d: the window {window.kernel} with dilation {window.dilation} does not fit into images of "
                         f"{x.shape[2]}x{x.shape[3]} with padding {window.padding}; make it smaller or pad more")
    return Conv2d.apply(x, weight, bias, window=window, groups=groups,
                        operands=operands_of(weight) if operands is None else operands)


def conv_transpose2d(x: Any, weight: Any, bias: Any = None, stride: Numbers = 1, padding: Numbers = 0,
                     output_padding: Numbers = 0, groups: int = 1, dilation: Numbers = 1) -> Tensor:
    """The adjoint of conv2d, with x (N, C, H, W), weight (C, O/groups, kh, kw) and bias (O,): (N, O, OH, OW).

    x may come without N. `output_padding` adds rows and columns at the end, since several image sizes have a convolution of the
    same size. Raises ShapeError where the channels do not fit, or nothing would come out.
    """
    if len(x.shape) == 3:
        return _first(conv_transpose2d(expand_dims(x, 0), weight, bias, stride, padding, output_padding, groups, dilation))
    check_input("conv_transpose2d", x, 2)
    window = _window("conv_transpose2d", weight, stride, padding, dilation)
    check_channels("conv_transpose2d", x, weight, bias, groups, channels=weight.shape[0], outputs=weight.shape[1] * groups)
    extra = numbers("conv_transpose2d", "output_padding", output_padding, 2, 0)
    x, size = transposed_size("conv_transpose2d", x, window, extra)
    return ConvTranspose2d.apply(x, weight, bias, window=window, groups=groups, size=size, operands=operands_of(weight))


def transposed_size(name: str, x: Any, window: Any, extra: tuple[int, ...]) -> tuple[Any, Any]:
    """The size of a transposed convolution's result, and its input: with zeros behind it where there are windows that begin in
    the output padding."""
    if not all(e < max(s, d) for e, s, d in zip(extra, window.stride, window.dilation)):
        raise ShapeError(f"{name}: output_padding is {extra}; it must be smaller than the stride {window.stride} "
                         f"or the dilation {window.dilation}")
    shape = x.shape[2:]
    size = tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 + e
                 for n, k, s, p, d, e in zip(shape, window.kernel, window.stride, window.padding, window.dilation, extra))
    if min(shape) < 1 or min(size) < 1:
        raise ShapeError(f"{name}: an input of {'x'.join(map(str, shape))} with padding {window.padding} would give "
                         f"{'x'.join(map(str, size))}; pad less")
    more = [e // s for e, s in zip(extra, window.stride)]
    return pad(x, [(0, 0), (0, 0), *((0, m) for m in more)]) if any(more) else x, size


class Conv2d(Function):
    """y = w * windows(x) + b."""

    half = "products"
    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array, bias: Array | None, *, window: Window, groups: int,
                operands: str = "") -> Array:
        ctx.save(x, weight)
        ctx.window, ctx.groups, ctx.products = window, groups, _products(x, weight, groups, operands)
        result: Array = ctx.products[0](x, weight, bias, window, groups)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, ...]:
        x, weight = ctx.saved
        return (ctx.products[1](grad, weight, None, ctx.window, ctx.groups, x.shape[2:]) if ctx.needs[0] else None,
                *_parameter_gradients(ctx, x, grad, "y"))

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.input(0), ctx.input(1)
        common = {"window": ctx.window, "groups": ctx.groups}
        return (ConvTranspose2d.apply(grad, weight, None, size=x.shape[2:], **common) if ctx.needs[0] else None,
                KernelGradient.apply(x, grad, **common) if ctx.needs[1] else None,
                grad.sum((0, 2, 3)) if ctx.needs[2] else None)


class ConvTranspose2d(Function):
    """The adjoint of Conv2d's linear map, plus b."""

    half = "products"
    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, weight: Array, bias: Array | None, *, window: Window, groups: int,
                size: Pair, operands: str = "") -> Array:
        ctx.save(x, weight)
        ctx.window, ctx.groups, ctx.products = window, groups, _products(x, weight, groups, operands)
        result: Array = ctx.products[1](x, weight, bias, window, groups, size)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Array) -> tuple[Array | None, ...]:
        x, weight = ctx.saved
        return (ctx.products[0](grad, weight, None, ctx.window, ctx.groups) if ctx.needs[0] else None,
                *_parameter_gradients(ctx, grad, x, "x"))

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.input(0), ctx.input(1)
        common = {"window": ctx.window, "groups": ctx.groups}
        return (Conv2d.apply(grad, weight, None, **common) if ctx.needs[0] else None,
                KernelGradient.apply(grad, x, **common) if ctx.needs[1] else None,
                grad.sum((0, 2, 3)) if ctx.needs[2] else None)


class KernelGradient(Function):
    """The weight's gradient from x and that of y: linear in both, as the convolution is in x and the weight."""

    half = "products"
    floats = 4

    @staticmethod
    def forward(ctx: Context, x: Array, y: Array, *, window: Window, groups: int) -> Array:
        ctx.save(x, y)
        ctx.window, ctx.groups = window, groups
        return kernel_gradient(x, y, window, groups)[0]

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> tuple[Any, ...]:
        x, y = ctx.input(0), ctx.input(1)
        common = {"window": ctx.window, "groups": ctx.groups}
        return (ConvTranspose2d.apply(y, grad, None, size=x.shape[2:], **common) if ctx.needs[0] else None,
                Conv2d.apply(x, grad, None, **common) if ctx.needs[1] else None)


def _products(x: Array, weight: Array, groups: int, operands: str) -> tuple[Any, ...]:
    """Convolution, adjoint and gradient of the kernel: of rounded numbers where `operands` is "bfloat16", but for depthwise
    convolutions, which memory limits; on a device, of numbers that may be cut where it is "tf32"."""
    if operands == "tf32" and type(x) is not np.ndarray and x.dtype.name == "float32":
        return tuple(lambda *given, run=run: run(*given, operands) for run in (convolve, convolve_adjoint, kernel_gradient))
    if operands != "bfloat16" or x.dtype.char != "f" or min(weight.shape[1], weight.shape[0] // groups) < 2:
        return convolve, convolve_adjoint, kernel_gradient
    from mpitrain.kernels import convolution_bfloat16 as rounded
    return rounded.convolve_bfloat16, rounded.convolve_adjoint_bfloat16, rounded.kernel_gradient_bfloat16


def _parameter_gradients(ctx: Context, x: Array, y: Array, bias_of: str) -> tuple[Array | None, Array | None]:
    """The gradients of weight and bias, in one pass where both are wanted; the bias is added to `bias_of`."""
    if ctx.needs[1]:
        weight, bias = ctx.products[2](x, y, ctx.window, ctx.groups, ctx.out(1), bias_of if ctx.needs[2] else "")
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


def _window(name: str, weight: Any, stride: Any, padding: Any, dilation: Any) -> Window:
    check_weight(name, weight, 2)
    window: Any = Window((weight.shape[2], weight.shape[3]), *(
        numbers(name, what, value, 2, least)                           # type: ignore[arg-type]
        for what, value, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1))))
    if min(window.kernel) < 1:
        raise ShapeError(f"{name}: the weight has shape {tuple(weight.shape)}: its windows are empty")
    return window


def _first(x: Tensor) -> Tensor:
    return reshape(x, x.shape[1:])
