"""Convolutions and pooling over images (N, C, H, W); sizes are one number or (height, width). Initial values are PyTorch's; a
window's stride is its size unless given."""

from __future__ import annotations

from typing import Any, TypeAlias

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn import init
from mpitrain.nn.init import Initialiser
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.ops.conv import pair

__all__ = ["AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "AvgPool2d", "Conv2d", "ConvTranspose2d", "MaxPool2d"]

Size: TypeAlias = int | tuple[int, int]


class _Conv(Module):
    def __init__(self, shape: tuple[int, int, int, int], outputs: int, bias: bool, weight_init: Initialiser,
                 bias_init: Initialiser | None):
        self.weight = Parameter(shape, weight_init)
        self.bias = Parameter((outputs,), bias_init or init.fan_in_uniform(shape)) if bias else None


class Conv2d(_Conv):
    """(N, inputs, H, W) to (N, outputs, H', W') with weight (outputs, inputs/groups, kh, kw)."""

    def __init__(self, inputs: int, outputs: int, kernel: Size, *, stride: Size = 1, padding: Size = 0, dilation: Size = 1,
                 groups: int = 1, bias: bool = True, weight_init: Initialiser = init.default_weight,
                 bias_init: Initialiser | None = None):
        _check_groups(inputs, outputs, groups)
        super().__init__((outputs, inputs // groups, *pair(kernel)), outputs, bias, weight_init, bias_init)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def forward(self, x: Any) -> Tensor:
        return ops.conv2d(x, self.weight, self.bias, stride=self.stride, padding=self.padding, dilation=self.dilation,
                          groups=self.groups)


class ConvTranspose2d(_Conv):
    """The transpose of a convolution; weight (inputs, outputs/groups, kh, kw)."""

    def __init__(self, inputs: int, outputs: int, kernel: Size, *, stride: Size = 1, padding: Size = 0,
                 output_padding: Size = 0, dilation: Size = 1, groups: int = 1, bias: bool = True,
                 weight_init: Initialiser = init.default_weight, bias_init: Initialiser | None = None):
        _check_groups(inputs, outputs, groups)
        super().__init__((inputs, outputs // groups, *pair(kernel)), outputs, bias, weight_init, bias_init)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.dilation, self.groups = dilation, groups

    def forward(self, x: Any) -> Tensor:
        return ops.conv_transpose2d(x, self.weight, self.bias, stride=self.stride, padding=self.padding,
                                    output_padding=self.output_padding, dilation=self.dilation, groups=self.groups)


def _check_groups(inputs: int, outputs: int, groups: int) -> None:
    if groups < 1 or inputs % groups or outputs % groups:
        raise ShapeError(f"a convolution from {inputs} to {outputs} channels cannot have {groups} groups; "
                         "both must be multiples of the groups")


class MaxPool2d(Module):
    """The largest value of each window. ReLU before or after it can be computed in the same pass (`activation`)."""

    def __init__(self, kernel: Size, stride: Size | None = None, padding: Size = 0, *, activation: str | None = None):
        if activation not in (None, "relu"):
            raise ConfigError(f'max pooling takes "relu" as its activation, or None, not "{activation}"; put others after it')
        self.kernel, self.stride, self.padding, self.relu = kernel, stride, padding, activation == "relu"

    def forward(self, x: Any) -> Tensor:
        return ops.max_pool2d(x, self.kernel, stride=self.stride, padding=self.padding, relu=self.relu)


class AvgPool2d(Module):
    """The mean of each window; padding counts as zeros unless `count_include_pad` is False."""

    def __init__(self, kernel: Size, stride: Size | None = None, padding: Size = 0, count_include_pad: bool = True):
        self.kernel, self.stride, self.padding, self.count_include_pad = kernel, stride, padding, count_include_pad

    def forward(self, x: Any) -> Tensor:
        return ops.avg_pool2d(x, self.kernel, stride=self.stride, padding=self.padding,
                              count_include_pad=self.count_include_pad)


class AdaptiveAvgPool2d(Module):
    """Means over windows that divide the image into `size` parts."""

    def __init__(self, size: Size):
        self.size = size

    def forward(self, x: Any) -> Tensor:
        return ops.adaptive_avg_pool2d(x, self.size)


class AdaptiveMaxPool2d(Module):
    """Maxima over windows that divide the image into `size` parts."""

    def __init__(self, size: Size):
        self.size = size

    def forward(self, x: Any) -> Tensor:
        return ops.adaptive_max_pool2d(x, self.size)
