"""Convolutions of series (N, C, L), images (N, C, H, W) and volumes (N, C, D, H, W), and their transposes.

Sizes are one number, or one for each dim; inputs may come without the batch. Initial values are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn import init
from mpitrain.nn.init import Initialiser
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.ops.geometry import numbers

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]

Size: TypeAlias = int | Sequence[int]
MODES = ("zeros", "reflect", "replicate", "circular")


class _Windows(Module):
    """What convolutions and their transposes have in common."""

    dims = 0
    op = ""                                       # its name in ops

    @property
    def _op(self) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] = getattr(ops, self.op)
        return found

    def _describe(self, channels: tuple[int, int], rest: tuple[int, int], kernel: Size, groups: int, bias: bool,
                  weight_init: Initialiser, bias_init: Initialiser | None) -> None:
        """`channels` are the inputs and outputs, `rest` those of them in dims 0 and 1 of the weight."""
        if groups < 1 or channels[0] % groups or channels[1] % groups:
            raise ShapeError(f"a convolution from {channels[0]} to {channels[1]} channels cannot have {groups} groups; "
                             "both must be multiples of the groups")
        shape = (rest[0], rest[1] // groups, *numbers(type(self).__name__, "kernel", kernel, self.dims))
        self.weight = Parameter(shape, weight_init)
        self.bias = Parameter((channels[1],), bias_init or init.fan_in_uniform(shape)) if bias else None


class _Conv(_Windows):
    channel_dims = 0, 1

    def __init__(self, inputs: int, outputs: int, kernel: Size, stride: Size = 1, padding: Size | str = 0, dilation: Size = 1,
                 groups: int = 1, bias: bool = True, padding_mode: str = "zeros", *,
                 weight_init: Initialiser = init.default_weight, bias_init: Initialiser | None = None):
        if padding_mode not in MODES:
            raise ConfigError(f'padding_mode is "{padding_mode}", expected one of {", ".join(MODES)}')
        self._describe((inputs, outputs), (outputs, inputs), kernel, groups, bias, weight_init, bias_init)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.padding_mode = padding_mode

    def forward(self, x: Any) -> Tensor:
        return self.convolve(x, self.bias)

    def convolve(self, x: Any, bias: Any, weight: Any = None) -> Tensor:
        """The layer with another bias, or with None, and perhaps with another weight."""
        weight, padding = self.weight if weight is None else weight, self.padding
        if self.padding_mode != "zeros" and padding != "valid":
            x, padding = self._padded(x, weight.shape[2:]), 0
        return self._op(x, weight, bias, stride=self.stride, padding=padding, dilation=self.dilation,
                        groups=self.groups)

    def _padded(self, x: Any, kernel: Sequence[int]) -> Tensor:
        """x with what the padding mode puts around it."""
        name = type(self).__name__
        if isinstance(self.padding, str):
            around = [d * (k - 1) for k, d in zip(kernel, numbers(name, "dilation", self.dilation, self.dims))]
            widths = [(total // 2, total - total // 2) for total in around]
        else:
            widths = [(n, n) for n in numbers(name, "padding", self.padding, self.dims, 0)]
        leading = [(0, 0)] * (len(x.shape) - self.dims)
        return ops.pad(x, [*leading, *widths], mode=self.padding_mode)


class Conv1d(_Conv):
    """(N, inputs, L) to (N, outputs, L'), with weight (outputs, inputs/groups, k)."""

    dims, op = 1, "conv1d"


class Conv2d(_Conv):
    """(N, inputs, H, W) to (N, outputs, H', W'), with weight (outputs, inputs/groups, kh, kw).

    `padding` is numbers, "valid" (none) or "same" (the output is as large as the input, for stride 1). `padding_mode` says what
    stands there: "zeros", "reflect", "replicate" or "circular".
    """

    dims, op = 2, "conv2d"


class Conv3d(_Conv):
    """(N, inputs, D, H, W) to (N, outputs, D', H', W'), with weight (outputs, inputs/groups, kd, kh, kw)."""

    dims, op = 3, "conv3d"


class _ConvTranspose(_Windows):
    channel_dims = 1, 0

    def __init__(self, inputs: int, outputs: int, kernel: Size, stride: Size = 1, padding: Size = 0, output_padding: Size = 0,
                 groups: int = 1, bias: bool = True, dilation: Size = 1, *, weight_init: Initialiser = init.default_weight,
                 bias_init: Initialiser | None = None):
        self._describe((inputs, outputs), (inputs, outputs), kernel, groups, bias, weight_init, bias_init)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.dilation, self.groups = dilation, groups

    def forward(self, x: Any) -> Tensor:
        return self._op(x, self.weight, self.bias, stride=self.stride, padding=self.padding, output_padding=self.output_padding,
                       dilation=self.dilation, groups=self.groups)


class ConvTranspose1d(_ConvTranspose):
    """The transpose of a convolution of series; weight (inputs, outputs/groups, k)."""

    dims, op = 1, "conv_transpose1d"


class ConvTranspose2d(_ConvTranspose):
    """The transpose of a convolution of images; weight (inputs, outputs/groups, kh, kw)."""

    dims, op = 2, "conv_transpose2d"


class ConvTranspose3d(_ConvTranspose):
    """The transpose of a convolution of volumes; weight (inputs, outputs/groups, kd, kh, kw)."""

    dims, op = 3, "conv_transpose3d"
