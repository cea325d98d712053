"""Padding layers and other sizes of images. Letters: `N` batch, `C` channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.nn.module import Module
from mpitrain.ops.geometry import LAYOUTS

__all__ = ["CircularPad1d", "CircularPad2d", "CircularPad3d", "ConstantPad1d", "ConstantPad2d", "ConstantPad3d",
           "ReflectionPad1d", "ReflectionPad2d", "ReflectionPad3d", "ReplicationPad1d", "ReplicationPad2d", "ReplicationPad3d",
           "Upsample", "ZeroPad1d", "ZeroPad2d", "ZeroPad3d"]


class _Pad(Module):
    """More, or less where negative, on both sides of the last dims: one number, or two for each dim, the last dim's first."""

    dims = 0
    mode = "constant"
    value: float | None = None

    def __init__(self, padding: int | Sequence[int]):
        widths = (padding,) * (2 * self.dims) if isinstance(padding, int) else tuple(padding)
        if len(widths) != 2 * self.dims:
            raise ShapeError(f"{type(self).__name__}: padding is {padding}, expected an integer, or {2 * self.dims} of them")
        self.widths = [(before, after) for before, after in zip(widths[-2::-2], widths[::-2])]

    def forward(self, x: Any) -> Tensor:
        shape = tuple(x.shape)
        if len(shape) not in (self.dims + 1, self.dims + 2):
            raise ShapeError(f"{type(self).__name__} expects {LAYOUTS[self.dims]}, or that without N, got shape {shape}")
        return ops.pad(x, [*[(0, 0)] * (len(shape) - self.dims), *self.widths], self.mode, self.value)


class ConstantPad1d(_Pad):
    """`value` around (N, C, L) or (C, L)."""

    dims = 1

    def __init__(self, padding: int | Sequence[int], value: float):
        super().__init__(padding)
        self.value = value


class ConstantPad2d(ConstantPad1d):
    """`value` around (N, C, H, W) or (C, H, W)."""

    dims = 2
    by_channel = True


class ConstantPad3d(ConstantPad1d):
    """`value` around (N, C, D, H, W) or (C, D, H, W)."""

    dims = 3


class ZeroPad1d(_Pad):
    """Zeros around (N, C, L) or (C, L)."""

    dims = 1


class ZeroPad2d(_Pad):
    """Zeros around (N, C, H, W) or (C, H, W)."""

    dims = 2
    by_channel = True


class ZeroPad3d(_Pad):
    """Zeros around (N, C, D, H, W) or (C, D, H, W)."""

    dims = 3


class ReflectionPad1d(_Pad):
    """What lies inside (N, C, L) or (C, L), mirrored at the first and the last value."""

    dims, mode = 1, "reflect"


class ReflectionPad2d(_Pad):
    """What lies inside (N, C, H, W) or (C, H, W), mirrored at the outermost values."""

    dims, mode = 2, "reflect"
    by_channel = True


class ReflectionPad3d(_Pad):
    """What lies inside (N, C, D, H, W) or (C, D, H, W), mirrored at the outermost values."""

    dims, mode = 3, "reflect"


class ReplicationPad1d(_Pad):
    """The first and the last value of (N, C, L) or (C, L) again."""

    dims, mode = 1, "replicate"


class ReplicationPad2d(_Pad):
    """The outermost values of (N, C, H, W) or (C, H, W) again."""

    dims, mode = 2, "replicate"
    by_channel = True


class ReplicationPad3d(_Pad):
    """The outermost values of (N, C, D, H, W) or (C, D, H, W) again."""

    dims, mode = 3, "replicate"


class CircularPad1d(_Pad):
    """The values of the other end of (N, C, L) or (C, L)."""

    dims, mode = 1, "circular"


class CircularPad2d(_Pad):
    """The values of the other ends of (N, C, H, W) or (C, H, W)."""

    dims, mode = 2, "circular"
    by_channel = True


class CircularPad3d(_Pad):
    """The values of the other ends of (N, C, D, H, W) or (C, D, H, W)."""

    dims, mode = 3, "circular"


class Upsample(Module):
    """(N, C, ...) with another size of the last dims, by `ops.interpolate`."""

    by_channel = True

    def __init__(self, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None):
        self.size, self.scale_factor, self.mode, self.align_corners = size, scale_factor, mode, align_corners

    def forward(self, x: Any) -> Tensor:
        return ops.interpolate(x, self.size, self.scale_factor, self.mode, self.align_corners)
