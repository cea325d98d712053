"""Dropout as in native/random.c, with words of Philox made where they are needed: the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.kernels.loops.mathematics import u
from mpitrain.kernels.loops.philox import words_along

AT_ONCE = 1024                                    # Random words.


@register_jitable
def dropout(x: Any, rows: Any, added: Any, y: Any, bits: Any, key: int, least: int, scale: float, height: int,
            width: int) -> None:
    words, keep = np.empty(AT_ONCE + 8, np.uint32), np.empty(AT_ONCE + 8, np.uint8)
    factor, zero = x.dtype.type(scale), x.dtype.type(0)
    for r in range(height):
        to = r * ((width + 7) // 8)
        first = rows[u(height + r)]
        skipped = first % 4
        for start in range(0, width, AT_ONCE):
            n, at = min(AT_ONCE, width - start), r * width + start
            words_along(u(key), u(rows[r]), (first + start) // 4, words, (skipped + n + 3) // 4)
            for i in range(n):
                keep[i] = np.int64(words[u(skipped + i)]) >= least
            for i in range(n):
                y[u(at + i)] = (x[u(at + i)] if keep[i] else zero) * factor
            if added.size:
                for i in range(n):
                    y[u(at + i)] += added[u(at + i)]
            keep[n:n + 8] = 0
            for i in range((n + 7) // 8):
                packed = 0
                for j in range(8):
                    packed |= keep[u(8 * i + j)] << j
                bits[u(to + start // 8 + i)] = packed


@register_jitable
def dropout_grad(grad: Any, bits: Any, dx: Any, scale: float, height: int, width: int) -> None:
    factor, zero, bytes_each = grad.dtype.type(scale), grad.dtype.type(0), (width + 7) // 8
    for r in range(height):
        first = r * width
        for at in range(width // 8):
            packed = bits[r * bytes_each + at]
            for j in range(8):
                dx[u(first + 8 * at + j)] = (grad[u(first + 8 * at + j)] if packed >> j & 1 else zero) * factor
        for i in range(width - width % 8, width):
            dx[u(first + i)] = (grad[u(first + i)] if bits[r * bytes_each + i // 8] >> (i % 8) & 1 else zero) * factor
