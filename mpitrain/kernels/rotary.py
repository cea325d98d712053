"""Rotary positions: pairs of numbers of a row turned by the angles of its position."""

from __future__ import annotations

from mpitrain.backend import Array, array_module
from mpitrain.kernels.kernel import Kernel


def _rotary(x: Array, cosines: Array, sines: Array, length: int, between: int, interleaved: bool, back: bool) -> Array:
    xp, half = array_module(x), cosines.shape[1]
    rows = xp.arange(len(x))
    tables = rows // (length * between) % (len(cosines) // length) * length + rows % length if len(x) else rows
    c, s = cosines[tables], -sines[tables] if back else sines[tables]
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    y = x.copy()
    y[:, a] = x[:, a] * c - x[:, b] * s
    y[:, b] = x[:, b] * c + x[:, a] * s
    return y


rotary = Kernel("rotary", _rotary)
"""The first 2 H numbers of each row of x (R, D) as pairs (i, i + H), or (2 i, 2 i + 1) where `interleaved`, turned by angles
whose cosines and sines (T, H) are given, or `back` by them: (x, cosines, sines, length, between, interleaved, back).

Row r has the angles of row r // (length * between) % (T // length) * length + r % length: texts of `length` positions, of which
`between` that follow each other have the same positions."""
