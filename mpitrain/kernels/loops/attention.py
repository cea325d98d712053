"""What attention does between its products, row by row of scores: softmax, its gradient, and dropping."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array
from mpitrain.kernels import blocked_attention
from mpitrain.kernels.loops.mathematics import choose, exp, u
from mpitrain.kernels.loops.rows import LANES, dot, largest, total_of
from mpitrain.kernels.loops.typed import loop
from mpitrain.kernels.product import rounded


@loop("X!:rn X!:r X!:r X!:r ir in")
def _weigh(s: Any, tops: Any, sums: Any, factors: Any, rows: int, n: int) -> None:
    lanes, none, part = np.empty(LANES, s.dtype), s.dtype.type(-np.inf), np.empty(n, s.dtype)
    for r in range(rows):
        first = r * n
        most = largest(s, first, n, lanes)
        most = choose(most > tops[r], most, tops[r])
        base = choose(most == none, s.dtype.type(0), most)
        factors[r] = exp(tops[r] - base)
        tops[r] = most
        for i in range(n):
            part[i] = exp(s[u(first + i)] - base)
        for i in range(n):
            s[u(first + i)] = part[i]
        sums[r] = sums[r] * factors[r] + total_of(part, 0, n, lanes)


def weigh(s: Array, tops: Array, sums: Array) -> Array:
    factors = np.empty_like(tops)
    _weigh(s, tops, sums, factors, tops.size, s.shape[-1])
    return factors


@loop("X!:rn X!:rn X:r X:r X:r d ir in")
def _slopes(s: Any, ds: Any, tops: Any, inverses: Any, means: Any, scale: float, rows: int,
            n: int) -> None:
    part, factor = np.empty(n, s.dtype), s.dtype.type(scale)
    for r in range(rows):
        first, top, inverse, mean = r * n, tops[r], inverses[r], means[r]
        for i in range(n):
            part[i] = exp(s[u(first + i)] - top) * inverse
        for i in range(n):
            s[u(first + i)] = part[i]
        for i in range(n):
            ds[u(first + i)] = (ds[u(first + i)] - mean) * part[i] * factor


def slopes(s: Array, ds: Array, tops: Array, inverses: Array, means: Array, scale: float) -> None:
    _slopes(s, ds, tops, inverses, means, scale, tops.size, s.shape[-1])


BETWEEN = blocked_attention.Between(weigh, slopes, blocked_attention.rescale, blocked_attention.as_it_is)
ROUNDED = BETWEEN._replace(factor=rounded)


def weights(x: Any, y: Any, scale: float, matrices: int, rows: int, n: int, causal: int) -> None:
    lanes, part, factor = np.empty(LANES, x.dtype), np.empty(n, x.dtype), x.dtype.type(scale)
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for r in range(matrices * rows):
        first, seen = r * n, min(r % rows + 1, n) if causal else n
        for i in range(seen):
            part[i] = x[u(first + i)] * factor
        top = largest(part, 0, seen, lanes)
        top = choose(top == x.dtype.type(-np.inf), zero, top)
        for i in range(seen):
            part[i] = exp(part[i] - top)
        total = total_of(part, 0, seen, lanes)
        inverse = zero if total == zero else one / total
        for i in range(seen):
            y[u(first + i)] = part[i] * inverse
        for i in range(seen, n):
            y[u(first + i)] = zero


def weights_gradient(y: Any, grad: Any, dx: Any, scale: float, matrices: int, rows: int, n: int, causal: int) -> None:
    lanes, part, factor = np.empty(LANES, y.dtype), np.empty(n, y.dtype), y.dtype.type(scale)
    for r in range(matrices * rows):
        first, seen = r * n, min(r % rows + 1, n) if causal else n
        mean = dot(y, grad, first, seen, lanes)
        for i in range(seen):
            part[i] = (grad[u(first + i)] - mean) * (y[u(first + i)] * factor)
        for i in range(seen):
            dx[u(first + i)] = part[i]
        for i in range(seen, n):
            dx[u(first + i)] = y.dtype.type(0)
