"""Convolutions, pools, resampling, Fourier transforms and linear algebra for test_on_a_device.py: an example of each op."""

from __future__ import annotations

from typing import Any

from ops.parity import normal

from mpitrain import ops

CASES: dict[str, list[tuple[Any, ...]]] = {
    "conv1d": [(lambda x, w, b: ops.conv1d(x, w, b, padding="same"), normal(2, 3, 5), normal(4, 3, 2), normal(4))],
    "conv3d": [(lambda x, w, b: ops.conv3d(x, w, b, 2, 1), normal(2, 2, 4, 5, 3), normal(3, 2, 3, 2, 2), normal(3))],
    "conv_transpose1d": [(lambda x, w, b: ops.conv_transpose1d(x, w, b, 2), normal(2, 3, 5), normal(3, 4, 2), normal(4))],
    "conv_transpose3d": [(lambda x, w, b: ops.conv_transpose3d(x, w, b, 2), normal(1, 2, 2, 3, 2), normal(2, 3, 2, 2, 2),
                          normal(3))],
    "interpolate": [(lambda x: ops.interpolate(x, size=7, mode="bicubic"), normal(1, 2, 4, 5)),
                    (lambda x: ops.interpolate(x, size=3), normal(1, 2, 4, 5))],
    "pad": [(lambda x: ops.pad(x, [(1, 0), (2, 1)], value=3.0), normal(2, 2)), (lambda x: ops.pad(x, (1, -1)), normal(2, 2)),
            (lambda x: ops.pad(x, (2, 1), "reflect"), normal(2, 4))],
}
