"""Convolutions of series (N, C, L) and volumes (N, C, D, H, W), and their transposes, by those of images.

A series is an image of one row. For a volume the positions of the kernel in depth become channels: `DepthWindows` puts the kd
planes that a window sees side by side, which are then C kd channels of N OD images. So the sum over channels, depth and plane is
one sum in one order, and the copy is kd volumes where unfolding all dims would take kd kh kw.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels.convolution import Window
from mpitrain.ops.conv import Conv2d, ConvTranspose2d, transposed_size
from mpitrain.ops.geometry import Numbers, Padding, check_channels, check_input, check_weight, numbers, padding_by_name
from mpitrain.ops.linalg import operands_of
from mpitrain.ops.shape import expand_dims, pad, reshape, transpose

__all__ = ["conv1d", "conv3d", "conv_transpose1d", "conv_transpose3d"]


class _Geometry(NamedTuple):
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def plane(self) -> Window:
        """The last two dims; a series has a first one of size 1."""
        if len(self.kernel) == 1:
            (k,), (s,), (p,), (d,) = self
            return Window((1, k), (1, s), (0, p), (1, d))
        return Window(*((values[-2], values[-1]) for values in self))

    def outputs(self, shape: Any) -> tuple[int, ...]:
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(shape, *self))


def conv1d(x: Any, weight: Any, bias: Any = None, stride: Numbers = 1, padding: Padding = 0, dilation: Numbers = 1,
           groups: int = 1) -> Tensor:
    """Cross-correlation of x (N, C, L) with weight (O, C/groups, k), plus bias (O,): (N, O, OL); otherwise as `conv2d`."""
    return _convolution("conv1d", 1, x, weight, bias, stride, padding, dilation, groups)


def conv3d(x: Any, weight: Any, bias: Any = None, stride: Numbers = 1, padding: Padding = 0, dilation: Numbers = 1,
           groups: int = 1) -> Tensor:
    """Cross-correlation of x (N, C, D, H, W) with weight (O, C/groups, kd, kh, kw), plus bias (O,): (N, O, OD, OH, OW);
    otherwise as `conv2d`."""
    return _convolution("conv3d", 3, x, weight, bias, stride, padding, dilation, groups)


def conv_transpose1d(x: Any, weight: Any, bias: Any = None, stride: Numbers = 1, padding: Numbers = 0,
                     output_padding: Numbers = 0, groups: int = 1, dilation: Numbers = 1) -> Tensor:
    """The adjoint of conv1d, with x (N, C, L), weight (C, O/groups, k) and bias (O,); otherwise as `conv_transpose2d`."""
    return _transposed("conv_transpose1d", 1, x, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose3d(x: Any, weight: Any, bias: Any = None, stride: Numbers = 1, padding: Numbers = 0,
                     output_padding: Numbers = 0, groups: int = 1, dilation: Numbers = 1) -> Tensor:
    """The adjoint of conv3d, with x (N, C, D, H, W), weight (C, O/groups, kd, kh, kw) and bias (O,); otherwise as
    `conv_transpose2d`."""
    return _transposed("conv_transpose3d", 3, x, weight, bias, stride, padding, output_padding, groups, dilation)


def _convolution(name: str, dims: int, x: Any, weight: Any, bias: Any, stride: Numbers, padding: Padding, dilation: Numbers,
                 groups: int) -> Tensor:
    check_weight(name, weight, dims)
    if len(x.shape) == dims + 1:
        y = _convolution(name, dims, expand_dims(x, 0), weight, bias, stride, padding, dilation, groups)
        return reshape(y, y.shape[1:])
    check_input(name, x, dims)
    steps, apart = numbers(name, "stride", stride, dims), numbers(name, "dilation", dilation, dims)
    if isinstance(padding, str):
        around, more = padding_by_name(name, padding, weight.shape[2:], steps, apart)
        x = pad(x, [(0, 0), (0, 0), *((0, m) for m in more)]) if any(more) else x
    else:
        around = numbers(name, "padding", padding, dims, 0)
    geometry = _Geometry(tuple(weight.shape[2:]), steps, around, apart)
    check_channels(name, x, weight, bias, groups, channels=weight.shape[1] * groups, outputs=weight.shape[0])
    outputs = geometry.outputs(x.shape[2:])
    if min(geometry.kernel) < 1 or min(outputs) < 1:
        raise ShapeError(f"{name}: the window {geometry.kernel} with dilation {apart} does not fit into an input of "
                         f"{tuple(x.shape[2:])} with padding {around}; make it smaller or pad more")
    n, (o, per_group, *kernel), window = x.shape[0], weight.shape, geometry.plane()
    if dims == 1:
        y = Conv2d.apply(reshape(x, (*x.shape[:2], 1, x.shape[2])), reshape(weight, (o, per_group, 1, *kernel)), bias,
                         window=window, groups=groups, operands=operands_of(weight))
        return reshape(y, (n, o, outputs[0]))
    planes = DepthWindows.apply(x, depth=_Depth.of(geometry, x.shape[2], outputs[0]))
    y = Conv2d.apply(reshape(planes, (n * outputs[0], -1, *x.shape[3:]) if planes.size else
                             (n * outputs[0], x.shape[1] * kernel[0], *x.shape[3:])),
                     reshape(weight, (o, per_group * kernel[0], *kernel[1:])), bias, window=window, groups=groups,
                     operands=operands_of(weight))
    return transpose(reshape(y, (n, outputs[0], o, *outputs[1:])), (0, 2, 1, 3, 4))


def _transposed(name: str, dims: int, x: Any, weight: Any, bias: Any, stride: Numbers, padding: Numbers, output_padding: Numbers,
                groups: int, dilation: Numbers) -> Tensor:
    check_weight(name, weight, dims)
    if len(x.shape) == dims + 1:
        y = _transposed(name, dims, expand_dims(x, 0), weight, bias, stride, padding, output_padding, groups, dilation)
        return reshape(y, y.shape[1:])
    check_input(name, x, dims)
    geometry = _Geometry(tuple(weight.shape[2:]), numbers(name, "stride", stride, dims),
                         numbers(name, "padding", padding, dims, 0), numbers(name, "dilation", dilation, dims))
    if min(geometry.kernel) < 1:
        raise ShapeError(f"{name}: the weight has shape {tuple(weight.shape)}: its windows are empty")
    check_channels(name, x, weight, bias, groups, channels=weight.shape[0], outputs=weight.shape[1] * groups)
    x, size = transposed_size(name, x, geometry, numbers(name, "output_padding", output_padding, dims, 0))
    window, (c, per_group, *kernel), o = geometry.plane(), weight.shape, weight.shape[1] * groups
    if dims == 1:
        y = ConvTranspose2d.apply(reshape(x, (*x.shape[:2], 1, x.shape[2])), reshape(weight, (c, per_group, 1, *kernel)), bias,
                                  window=window, groups=groups, size=(1, size[0]), operands=operands_of(weight))
        return reshape(y, (x.shape[0], o, size[0]))
    n, _, depth, *plane = x.shape
    planes = reshape(transpose(x, (0, 2, 1, 3, 4)), (n * depth, c, *plane))
    y = ConvTranspose2d.apply(planes, reshape(weight, (c, per_group * kernel[0], *kernel[1:])), None, window=window,
                              groups=groups, size=size[1:], operands=operands_of(weight))
    y = DepthOverlap.apply(reshape(y, (n, depth, o, kernel[0], *size[1:])), depth=_Depth.of(geometry, size[0], depth))
    return y if bias is None else y + reshape(bias, (-1, 1, 1, 1))


class _Depth(NamedTuple):
    """The windows along the first dim of a volume: `outputs` of `kernel` planes each, over `size` planes."""

    size: int
    outputs: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @classmethod
    def of(cls, geometry: _Geometry, size: int, outputs: int) -> _Depth:
        return cls(size, outputs, *(values[0] for values in geometry))

    def part(self, position: int) -> tuple[slice, slice]:
        """The windows whose plane number `position` lies inside, and those planes."""
        start = position * self.dilation - self.padding
        low = max(0, -(start // self.stride))
        high = max(low, min(self.outputs, (self.size - 1 - start) // self.stride + 1))
        first = start + low * self.stride
        return slice(low, high), slice(first, first + (high - low - 1) * self.stride + 1 if high > low else first, self.stride)


class DepthWindows(Function):
    """(N, OD, C, kd, H, W) of x (N, C, D, H, W): the planes that each window sees, zeros outside."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, depth: _Depth) -> Array:
        ctx.depth = depth
        return _windows(ctx.xp, x, depth)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return _overlap(ctx.xp, grad, ctx.depth)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return DepthOverlap.apply(grad, depth=ctx.depth)


class DepthOverlap(Function):
    """The adjoint of DepthWindows: planes are added to where they came from."""

    @staticmethod
    def forward(ctx: Context, x: Array, *, depth: _Depth) -> Array:
        ctx.depth = depth
        return _overlap(ctx.xp, x, depth)

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        return _windows(ctx.xp, grad, ctx.depth)

    @staticmethod
    def derivative(ctx: Context, grad: Tensor) -> Tensor:
        return DepthWindows.apply(grad, depth=ctx.depth)


def _windows(xp: Any, x: Array, depth: _Depth) -> Array:
    planes = x.swapaxes(1, 2)
    result = xp.empty((len(x), depth.outputs, x.shape[1], depth.kernel, *x.shape[3:]), x.dtype)
    for position in range(depth.kernel):
        windows, seen = depth.part(position)
        result[:, :windows.start, :, position] = 0
        result[:, windows.stop:, :, position] = 0
        result[:, windows, :, position] = planes[:, seen]
    return result


def _overlap(xp: Any, x: Array, depth: _Depth) -> Array:
    n, _, c, _, *plane = x.shape
    result = xp.zeros((n, c, depth.size, *plane), x.dtype)
    planes = result.swapaxes(1, 2)
    for position in range(depth.kernel):
        windows, seen = depth.part(position)
        planes[:, seen] += x[:, windows, :, position]
    return result
