"""Convolutions, pools, padding, resampling, Fourier transforms and linear algebra: entries of op_db and our functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain import ops

MAP: dict[str, Callable[..., Any]] = {
    "nn.functional.conv1d": ops.conv1d, "nn.functional.conv2d": ops.conv2d, "nn.functional.conv3d": ops.conv3d,
    "nn.functional.conv_transpose1d": ops.conv_transpose1d, "nn.functional.conv_transpose2d": ops.conv_transpose2d,
    "nn.functional.conv_transpose3d": ops.conv_transpose3d,
    "nn.functional.pad.constant": ops.pad, "nn.functional.pad.reflect": ops.pad, "nn.functional.pad.replicate": ops.pad,
    "nn.functional.pad.replicate_negative": ops.pad, "nn.functional.pad.circular": ops.pad,
    "constant_pad_nd": lambda x, pad, value=0.0: ops.pad(x, pad, value=value),
    "nn.functional.interpolate.nearest": ops.interpolate, "nn.functional.interpolate.nearest-exact": ops.interpolate,
    "nn.functional.interpolate.linear": ops.interpolate, "nn.functional.interpolate.bilinear": ops.interpolate,
    "nn.functional.interpolate.bicubic": ops.interpolate, "nn.functional.interpolate.trilinear": ops.interpolate,
    "nn.functional.interpolate.area": ops.interpolate,
}
