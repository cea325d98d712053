"""A product of few rows with the sums of native/product.h: blocks of terms, each summed in order with fused multiply-adds."""

from __future__ import annotations

from typing import Any

from mpitrain.kernels.loops.mathematics import fma, u

TERMS, UNIT = 384, 8                              # native/blocks.h's TERMS and GROUP


def few_rows(x: Any, w: Any, bias: Any, y: Any, m: int, n: int, k: int) -> None:
    parts = max(1, (k + TERMS - 1) // TERMS)
    size = ((k + parts - 1) // parts + UNIT - 1) // UNIT * UNIT
    for i in range(m):
        for j in range(n):
            total = x.dtype.type(0)
            for block in range(parts):
                part = x.dtype.type(0)
                for r in range(block * size, min(k, block * size + size)):
                    part = fma(x[u(i * k + r)], w[u(j * k + r)], part)
                total = part + total if block else part
            y[u(i * n + j)] = total + bias[u(j)] if len(bias) else total
