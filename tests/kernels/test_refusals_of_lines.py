"""What the kernels of lines and transforms refuse, their references refuse, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.errors import ShapeError
from mpitrain.kernels import fft, lines

X = np.arange(6, dtype=np.float32).reshape(2, 3)
ONES = np.ones((2, 1), np.int64)
WRONG: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "more lines of places": (lines.gather, (X, np.zeros((5, 1), np.int64), 1)),
    "no numbers": (lines.gather, (X[:, :0], 0 * ONES, 1)),
    "a place below 0": (lines.gather, (X, -ONES, 1)),
    "put below 0": (lines.scatter, (X.copy(), -ONES, X[:, :1].copy(), 1, False)),
    "a rank below 0": (lines.place_of_rank, (X, -ONES)),
    "a dim below 0": (lines.cumextremum, (X, -1, False)),
    "the last dim": (fft.half_transform, (X, (1,), 1.0, 1.0)),
    "a dim that is none": (fft.full_transform, (X + 0j, (-1,), False, 1.0)),
    "too few": (fft.real_transform, (X + 0j, 9, (), 1.0, 1.0))}


@pytest.mark.parametrize("name", WRONG)
def test_kernel_and_reference_refuse(name: str) -> None:
    kernel, arguments = WRONG[name]
    for version in (kernel, kernel.reference):
        with pytest.raises((ValueError, IndexError, TypeError, ShapeError)):
            version(*arguments)
