"""Rotary positions on a device; see kernels/rotary.py."""

from __future__ import annotations

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, computed, contiguous, over

SOURCE, WIDE, UNIT = Source("rotary"), 256, 8                         # rotary.cu's WIDE; pairs that a thread turns at once
_rotary = SOURCE.function("rotary", "X:rn S:th S:th X!:rn ir in ih it i i i d")


@device("rotary")
def rotary(x: Array, cosines: Array, sines: Array, length: int, between: int, interleaved: bool, back: bool) -> Array:
    x, made_in = contiguous(x), computed(x.dtype)
    y, (tables, half), (rows, columns) = array_module(x).empty(x.shape, x.dtype), cosines.shape, x.shape
    if x.size:
        units = rows * (-(-half // UNIT) + -(-(columns - 2 * half) // UNIT))
        _rotary(over(units), WIDE, x, contiguous(cosines, made_in), contiguous(sines, made_in), y, rows, columns, half, tables,
                length, between, interleaved, -1.0 if back else 1.0)
    return y
