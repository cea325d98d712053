"""Sums over rows as in native/column_sums.c: blocks of rows in the arrays' type, and those in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.kernels.loops.mathematics import u
from mpitrain.kernels.sums import BLOCK


def column_sums(x: Any, out: Any, rows: int, n: int) -> None:
    part, total = np.empty(n, x.dtype), np.zeros(n)
    for first in range(0, rows, BLOCK):
        at = first * n
        for i in range(n):
            part[i] = x[u(at + i)]
        for r in range(first + 1, min(first + BLOCK, rows)):
            at = r * n
            for i in range(n):
                part[i] += x[u(at + i)]
        for i in range(n):
            total[i] += part[i]
    for i in range(n):
        out[i] = total[i]
