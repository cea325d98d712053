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
    **{f"nn.functional.{kind}_pool{dims}d": getattr(ops, f"{kind}_pool{dims}d") for dims in (1, 2, 3)
       for kind in ("max", "avg", "adaptive_max", "adaptive_avg")},
    **{f"nn.functional.max_unpool{dims}d{variant}": getattr(ops, f"max_unpool{dims}d") for dims in (1, 2, 3)
       for variant in ("", ".grad")},
    **{f"fft.{inverse}{kind}fft{dims}": getattr(ops, f"{inverse}{kind}fft{dims}") for inverse in ("", "i")
       for kind in ("", "r", "h") for dims in ("", "2", "n")},
    "fft.fftshift": ops.fftshift, "fft.ifftshift": ops.ifftshift,
    "complex": ops.complex, "angle": ops.angle, "real": ops.real, "conj": ops.conj,
    "conj_physical": ops.conj, "resolve_conj": lambda x: x, "resolve_neg": lambda x: x, "polar": ops.polar,
    "einsum": lambda tensors, equation: ops.einsum(equation, *tensors), "tensordot": ops.tensordot,
}
