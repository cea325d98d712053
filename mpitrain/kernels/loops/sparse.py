"""Products by sparse matrices in the order of native/sparse.c: the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.kernels.loops.mathematics import fma, u

HEIGHT, CHAINS = 16, 4


@register_jitable
def wrong(starts: Any, columns: Any, rows: int, count: int, k: int) -> bool:
    """Whether starts or columns are none."""
    bad = starts[0] != 0 or starts[rows] != count
    for r in range(rows):
        bad = bad or starts[r + 1] < starts[r]
    for i in range(count):
        bad = bad or columns[i] < 0 or columns[i] >= k
    return bad


def block_product(x: Any, starts: Any, columns: Any, values: Any, bias: Any, y: Any, m: int, n: int, k: int, blocks: int) -> int:
    """Blocks of 16 rows and a column, in four sums."""
    if n % HEIGHT or wrong(starts, columns, n // HEIGHT, blocks, k):
        return 2
    sums = np.zeros(CHAINS * HEIGHT, x.dtype)
    for i in range(m):
        for g in range(n // HEIGHT):
            sums[:] = 0
            first = starts[g]
            for b in range(first, starts[g + 1]):
                left, to = x[u(i * k + columns[b])], (b - first) % CHAINS * HEIGHT
                for j in range(HEIGHT):
                    sums[u(to + j)] = fma(left, values[u(b * HEIGHT + j)], sums[u(to + j)])
            for j in range(HEIGHT):
                total = (sums[j] + sums[u(HEIGHT + j)]) + (sums[u(2 * HEIGHT + j)] + sums[u(3 * HEIGHT + j)])
                y[u(i * n + g * HEIGHT + j)] = total + bias[u(g * HEIGHT + j)] if bias.size else total
    return 0


def csr_product(x: Any, starts: Any, columns: Any, values: Any, bias: Any, turned: Any, y: Any, m: int, n: int, k: int,
                count: int) -> int:
    """Row by row, each sum in the order of its row."""
    if wrong(starts, columns, n, count, k):
        return 2
    for i in range(m):
        for j in range(n):
            total = x.dtype.type(0)
            for c in range(starts[j], starts[j + 1]):
                total = fma(values[u(c)], x[u(i * k + columns[u(c)])], total)
            y[u(i * n + j)] = total + bias[u(j)] if bias.size else total
    return 0
