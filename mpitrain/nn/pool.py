"""Pooling of images (N, C, H, W); sizes are one number, or one for each dim. A window's stride is its size unless given."""

from __future__ import annotations

from typing import Any, TypeAlias

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError
from mpitrain.nn.module import Module

__all__ = ["AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "AvgPool2d", "MaxPool2d"]

Size: TypeAlias = int | tuple[int, int]


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
