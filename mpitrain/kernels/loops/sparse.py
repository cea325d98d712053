"""Products by sparse matrices, and gradients of them, in the order of native/sparse.c: the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.kernels.loops.mathematics import fma, u

HEIGHT = 16
TERMS, UNIT = 384, 8                              # native/blocks.h's TERMS and GROUP


@register_jitable
def piece_of(k: int) -> int:
    """The terms of each piece of k, but for the last."""
    parts = max(1, (k + TERMS - 1) // TERMS)
    return max(1, ((k + parts - 1) // parts + UNIT - 1) // UNIT) * UNIT


@register_jitable
def wrong(starts: Any, columns: Any, rows: int, starting: int, count: int, k: int) -> bool:
    """Whether starts or columns are none."""
    size = piece_of(k)
    if starting != rows * max(1, (k + size - 1) // size) + 1:
        return True
    bad = starts[0] != 0 or starts[starting - 1] != count
    for r in range(starting - 1):
        bad = bad or starts[r + 1] < starts[r]
    for i in range(count):
        bad = bad or columns[i] < 0 or columns[i] >= k
    return bad


@register_jitable
def unordered(starts: Any, columns: Any, rows: int, pieces: int) -> bool:
    """Whether the columns of a row do not ascend."""
    for r in range(rows):
        for i in range(starts[r * pieces] + 1, starts[(r + 1) * pieces]):
            if columns[i] <= columns[i - 1]:
                return True
    return False


def block_product(x: Any, starts: Any, columns: Any, values: Any, bias: Any, turned: Any, y: Any, m: int, n: int, k: int,
                  starting: int, blocks: int) -> int:
    """Blocks of 16 rows and a column, piece by piece."""
    if n % HEIGHT or wrong(starts, columns, n // HEIGHT, starting, blocks, k):
        return 2
    size = piece_of(k)
    pieces = max(1, (k + size - 1) // size)
    for i in range(m):
        for j in range(n):
            g, total = j // HEIGHT, x.dtype.type(0)
            for p in range(pieces):
                part = x.dtype.type(0)
                for b in range(starts[g * pieces + p], starts[g * pieces + p + 1]):
                    part = fma(x[u(i * k + columns[u(b)])], values[u(b * HEIGHT + j % HEIGHT)], part)
                total = part + total if p else part
            y[u(i * n + j)] = total + bias[u(j)] if bias.size else total
    return 0


def csr_product(x: Any, starts: Any, columns: Any, values: Any, bias: Any, turned: Any, y: Any, m: int, n: int, k: int,
                starting: int, count: int) -> int:
    """Row by row, piece by piece, each sum in the order of its row."""
    if wrong(starts, columns, n, starting, count, k):
        return 2
    size = piece_of(k)
    pieces = max(1, (k + size - 1) // size)
    for i in range(m):
        for j in range(n):
            total = x.dtype.type(0)
            for p in range(pieces):
                part = x.dtype.type(0)
                for c in range(starts[j * pieces + p], starts[j * pieces + p + 1]):
                    part = fma(values[u(c)], x[u(i * k + columns[u(c)])], part)
                total = part + total if p else part
            y[u(i * n + j)] = total + bias[u(j)] if bias.size else total
    return 0


def block_values(w: Any, starts: Any, columns: Any, values: Any, n: int, k: int, starting: int, blocks: int) -> int:
    """The values of the blocks of a matrix."""
    size = piece_of(k)
    pieces = max(1, (k + size - 1) // size)
    if n % HEIGHT or wrong(starts, columns, n // HEIGHT, starting, blocks, k) or unordered(starts, columns, n // HEIGHT, pieces):
        return 2
    for g in range(n // HEIGHT):
        for b in range(starts[g * pieces], starts[(g + 1) * pieces]):
            for j in range(HEIGHT):
                values[u(b * HEIGHT + j)] = w[u((g * HEIGHT + j) * k + columns[u(b)])]
    return 0


def block_input_gradient(g: Any, starts: Any, columns: Any, values: Any, work: Any, by_x: Any, m: int, n: int, k: int,
                         starting: int, blocks: int) -> int:
    """g times the matrix: sums over its rows, in pieces of them."""
    size = piece_of(k)
    pieces = max(1, (k + size - 1) // size)
    if n % HEIGHT or wrong(starts, columns, n // HEIGHT, starting, blocks, k):
        return 2
    size = piece_of(n)
    part = np.zeros(k, g.dtype)
    for i in range(m):
        for c in range(k):
            by_x[u(i * k + c)] = 0
        for first in range(0, n, size):
            part[:] = 0
            for j in range(first, min(n, first + size)):
                group = j // HEIGHT
                for b in range(starts[group * pieces], starts[(group + 1) * pieces]):
                    c = columns[u(b)]
                    part[u(c)] = fma(g[u(i * n + j)], values[u(b * HEIGHT + j % HEIGHT)], part[u(c)])
            for c in range(k):
                by_x[u(i * k + c)] = part[u(c)] + by_x[u(i * k + c)] if first else part[u(c)]
    return 0


def block_weight_gradient(g: Any, x: Any, starts: Any, columns: Any, work: Any, by_w: Any, m: int, n: int, k: int, starting: int,
                          blocks: int) -> int:
    """g' x in the blocks, summed over rows in pieces of them; zero elsewhere."""
    size = piece_of(k)
    pieces = max(1, (k + size - 1) // size)
    if n % HEIGHT or wrong(starts, columns, n // HEIGHT, starting, blocks, k) or unordered(starts, columns, n // HEIGHT, pieces):
        return 2
    size = piece_of(m)
    for i in range(n * k):
        by_w[u(i)] = 0
    for j in range(n):
        group = j // HEIGHT
        for b in range(starts[group * pieces], starts[(group + 1) * pieces]):
            c, total = columns[u(b)], x.dtype.type(0)
            for first in range(0, m, size):
                part = x.dtype.type(0)
                for i in range(first, min(m, first + size)):
                    part = fma(x[u(i * k + c)], g[u(i * n + j)], part)
                total = part + total if first else part
            by_w[u(j * k + c)] = total
    return 0
