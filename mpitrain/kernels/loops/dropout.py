"""Dropout as in native/random.c, with words of Philox made where they are needed: the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array
from mpitrain.kernels.dropout import WORDS, rows_and_first
from mpitrain.kernels.loops.mathematics import u
from mpitrain.kernels.loops.philox import words_along
from mpitrain.kernels.loops.typed import loop

AT_ONCE = 1024                                    # Random words.


@loop("x uint64 x y uint8+ uint64+ i d i i")
def _dropout(x: Any, rows: Any, added: Any, y: Any, bits: Any, key: Any, least: int, scale: float, height: int,
             width: int) -> None:
    words, keep = np.empty(AT_ONCE + 8, np.uint32), np.empty(AT_ONCE + 8, np.uint8)
    factor, zero = x.dtype.type(scale), x.dtype.type(0)
    for r in range(height):
        to = r * ((width + 7) // 8)
        first: Any = np.int64(rows[u(height + r)])
        skipped = first % 4
        for start in range(0, width, AT_ONCE):
            n, at = min(AT_ONCE, width - start), r * width + start
            words_along(key[0], rows[r], (first + start) // 4, words, (skipped + n + 3) // 4)
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


def dropout(x: Array, rows: Array, key: int, p: float, added: Array | None, first: Any = 0) -> tuple[Array, Array]:
    x = np.ascontiguousarray(x)
    y, bits = np.empty_like(x), np.empty((x.shape[0], (x.shape[1] + 7) // 8), np.uint8)
    plus = x.reshape(-1)[:0] if added is None else np.ascontiguousarray(added)
    _dropout(x, rows_and_first(rows, first), plus, y, bits, np.array([key % (1 << 64)], np.uint64), round(p * WORDS), 1 / (1 - p),
             *x.shape)
    return y, bits


@loop("x uint8 y d i i")
def _dropout_grad(grad: Any, bits: Any, dx: Any, scale: float, height: int, width: int) -> None:
    factor, zero, bytes_each = grad.dtype.type(scale), grad.dtype.type(0), (width + 7) // 8
    for r in range(height):
        first = r * width
        for at in range(width // 8):
            packed = bits[r * bytes_each + at]
            for j in range(8):
                dx[u(first + 8 * at + j)] = (grad[u(first + 8 * at + j)] if packed >> j & 1 else zero) * factor
        for i in range(width - width % 8, width):
            dx[u(first + i)] = (grad[u(first + i)] if bits[r * bytes_each + i // 8] >> (i % 8) & 1 else zero) * factor


def dropout_grad(grad: Array, bits: Array, p: float) -> Array:
    grad = np.ascontiguousarray(grad)
    result = np.empty_like(grad)
    _dropout_grad(grad, bits, result, 1 / (1 - p), *grad.shape)
    return result
