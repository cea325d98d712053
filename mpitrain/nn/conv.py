"""Convolutions over images (N, C, H, W); sizes are one number or (height, width). Initial values are PyTorch's."""

from __future__ import annotations

from typing import Any, TypeAlias

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.nn import init
from mpitrain.nn.init import Initialiser
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.ops.conv import pair

__all__ = ["Conv2d", "ConvTranspose2d"]

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
