"""Pooling of series (N, C, L), images (N, C, H, W) and volumes (N, C, D, H, W), with or without N.

Sizes are one number, or one for each dim. A window's stride is its size unless given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError
from mpitrain.nn.module import Module

__all__ = ["AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool1d", "AdaptiveMaxPool2d",
           "AdaptiveMaxPool3d", "AvgPool1d", "AvgPool2d", "AvgPool3d", "LPPool1d", "LPPool2d", "LPPool3d", "MaxPool1d",
           "MaxPool2d", "MaxPool3d", "MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d"]

Size: TypeAlias = int | Sequence[int]


class _Pool(Module):
    op = ""                                       # its name in ops

    @property
    def _op(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(ops, self.op)
        return found


class _MaxPool(_Pool):
    def __init__(self, kernel: Size, stride: Size | None = None, padding: Size = 0, *, dilation: Size = 1,
                 ceil_mode: bool = False, return_indices: bool = False):
        self.kernel, self.stride = kernel, stride
        self.options: dict[str, Any] = {"padding": padding, "dilation": dilation, "ceil_mode": ceil_mode,
                                        "return_indices": return_indices}

    def forward(self, x: Any) -> Any:
        return self._op(x, self.kernel, self.stride, **self.options)


class MaxPool1d(_MaxPool):
    """The largest value of each window of (N, C, L); see `ops.max_pool1d`."""

    op = "max_pool1d"


class MaxPool2d(_MaxPool):
    """The largest value of each window of (N, C, H, W). ReLU before or after it can be had in the same pass (`activation`)."""

    op = "max_pool2d"
    by_channel = True

    def __init__(self, kernel: Size, stride: Size | None = None, padding: Size = 0, *, dilation: Size = 1,
                 ceil_mode: bool = False, return_indices: bool = False, activation: str | None = None):
        if activation not in (None, "relu"):
            raise ConfigError(f'max pooling takes "relu" as its activation, or None, not "{activation}"; put others after it')
        super().__init__(kernel, stride, padding, dilation=dilation, ceil_mode=ceil_mode, return_indices=return_indices)
        self.options["relu"] = activation == "relu"


class MaxPool3d(_MaxPool):
    """The largest value of each window of (N, C, D, H, W); see `ops.max_pool3d`."""

    op = "max_pool3d"


class _AvgPool(_Pool):
    def __init__(self, kernel: Size, stride: Size | None = None, padding: Size = 0, *, ceil_mode: bool = False,
                 count_include_pad: bool = True):
        self.kernel, self.stride = kernel, stride
        self.options: dict[str, Any] = {"padding": padding, "ceil_mode": ceil_mode, "count_include_pad": count_include_pad}

    def forward(self, x: Any) -> Tensor:
        y: Tensor = self._op(x, self.kernel, self.stride, **self.options)
        return y


class AvgPool1d(_AvgPool):
    """The mean of each window of (N, C, L); padding counts as zeros unless `count_include_pad` is False."""

    op = "avg_pool1d"


class AvgPool2d(_AvgPool):
    """The mean of each window of (N, C, H, W); padding counts as zeros unless `count_include_pad` is False.

    `divisor_override` is what sums are divided by instead of their count.
    """

    op = "avg_pool2d"
    by_channel = True

    def __init__(self, kernel: Size, stride: Size | None = None, padding: Size = 0, *, ceil_mode: bool = False,
                 count_include_pad: bool = True, divisor_override: int | None = None):
        super().__init__(kernel, stride, padding, ceil_mode=ceil_mode, count_include_pad=count_include_pad)
        self.options["divisor_override"] = divisor_override


class AvgPool3d(AvgPool2d):
    """The mean of each window of (N, C, D, H, W); otherwise as `AvgPool2d`."""

    op = "avg_pool3d"
    by_channel = False                            # An image without a batch is no volume: its channels would be pooled.


class _LPPool(_Pool):
    def __init__(self, norm: float, kernel: Size, stride: Size | None = None, *, ceil_mode: bool = False):
        self.norm, self.kernel, self.stride, self.ceil_mode = norm, kernel, stride, ceil_mode

    def forward(self, x: Any) -> Any:
        return self._op(x, self.norm, self.kernel, self.stride, self.ceil_mode)


class LPPool1d(_LPPool):
    """(sum of x^norm over each window)^(1 / norm), of (N, C, L)."""

    op = "lp_pool1d"


class LPPool2d(_LPPool):
    """(sum of x^norm over each window)^(1 / norm), of (N, C, H, W)."""

    op = "lp_pool2d"
    by_channel = True


class LPPool3d(_LPPool):
    """(sum of x^norm over each window)^(1 / norm), of (N, C, D, H, W)."""

    op = "lp_pool3d"


class _AdaptiveAvgPool(_Pool):
    def __init__(self, size: Any):
        self.size = size

    def forward(self, x: Any) -> Any:
        return self._op(x, self.size)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """Means over windows that divide a series into `size` parts."""

    op = "adaptive_avg_pool1d"


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """Means over windows that divide the image into `size` parts; None keeps a dim."""

    op = "adaptive_avg_pool2d"
    by_channel = True


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
    """Means over windows that divide the volume into `size` parts; None keeps a dim."""

    op = "adaptive_avg_pool3d"


class _AdaptiveMaxPool(_Pool):
    def __init__(self, size: Any, return_indices: bool = False):
        self.size, self.return_indices = size, return_indices

    def forward(self, x: Any) -> Any:
        return self._op(x, self.size, self.return_indices)


class AdaptiveMaxPool1d(_AdaptiveMaxPool):
    """Maxima over windows that divide a series into `size` parts."""

    op = "adaptive_max_pool1d"


class AdaptiveMaxPool2d(_AdaptiveMaxPool):
    """Maxima over windows that divide the image into `size` parts; None keeps a dim."""

    op = "adaptive_max_pool2d"
    by_channel = True


class AdaptiveMaxPool3d(_AdaptiveMaxPool):
    """Maxima over windows that divide the volume into `size` parts; None keeps a dim."""

    op = "adaptive_max_pool3d"


class _MaxUnpool(_Pool):
    def __init__(self, kernel: Size, stride: Size | None = None, padding: Size = 0):
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def forward(self, x: Any, indices: Any, output_size: Sequence[int] | None = None) -> Any:
        return self._op(x, indices, self.kernel, self.stride, self.padding, output_size)


class MaxUnpool1d(_MaxUnpool):
    """Series with the values of a max pool at their `indices`, 0 elsewhere."""

    op = "max_unpool1d"


class MaxUnpool2d(_MaxUnpool):
    """Images with the values of a max pool at their `indices`, 0 elsewhere."""

    op = "max_unpool2d"


class MaxUnpool3d(_MaxUnpool):
    """Volumes with the values of a max pool at their `indices`, 0 elsewhere."""

    op = "max_unpool3d"
