"""Scans, ranks, and values taken from or put at places, along the middle dim of arrays (outer, n, inner), as in native/lines.c:
the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.kernels.loops.mathematics import bits_of, choose, d, u

PART, LANES = 64, 8
TOP, MOST = np.uint64(1 << 63), np.uint64((1 << 64) - 1)
STEP, ADDED, HIGH = np.uint64(6364136223846793005), np.uint64(1442695040888963407), np.uint64(33)


@register_jitable
def _scan_line(x: Any, y: Any, at: int, step: int, n: int, product: bool) -> None:
    so_far = 1.0 if product else -0.0             # which leaves the sign of a first 0
    for _ in range(n):
        so_far = so_far * x[u(at)] if product else so_far + x[u(at)]
        y[u(at)] = so_far
        at += step


@register_jitable
def _scan_four(x: Any, y: Any, at: int, step: int, n: int, apart: int, product: bool) -> None:
    """Of four lines: the latency of an addition is that of four."""
    start = 1.0 if product else -0.0
    a, b, c, e = start, start, start, start
    for _ in range(n):
        p, q, r, s = x[u(at)], x[u(at + apart)], x[u(at + 2 * apart)], x[u(at + 3 * apart)]
        if product:
            a, b, c, e = a * p, b * q, c * r, e * s
        else:
            a, b, c, e = a + p, b + q, c + r, e + s
        y[u(at)], y[u(at + apart)], y[u(at + 2 * apart)], y[u(at + 3 * apart)] = a, b, c, e
        at += step


@register_jitable
def _scan(x: Any, y: Any, outer: int, n: int, inner: int, back: int, product: bool) -> None:
    """Running sums or products, in float64; `back`: from the end. Columns go PART side by side, and lines by fours."""
    start, step = (n - 1) * inner if back else 0, -inner if back else inner
    if inner == 1:
        whole = outer - outer % 4
        for line in range(0, whole, 4):
            _scan_four(x, y, line * n + start, step, n, n, product)
        for line in range(whole, outer):
            _scan_line(x, y, line * n + start, step, n, product)
        return
    so_far = np.empty(PART)
    for line in range(outer):
        for first in range(0, inner, PART):
            size, at = min(PART, inner - first), line * n * inner + start + first
            so_far[:] = 1.0 if product else -0.0
            for _ in range(n):
                for c in range(size):
                    so_far[u(c)] = so_far[u(c)] * x[u(at + c)] if product else so_far[u(c)] + x[u(at + c)]
                    y[u(at + c)] = so_far[u(c)]
                at += step


def cumsum(x: Any, y: Any, outer: int, n: int, inner: int, back: int) -> None:
    _scan(x, y, outer, n, inner, back, False)


def cumprod(x: Any, y: Any, outer: int, n: int, inner: int, back: int) -> None:
    _scan(x, y, outer, n, inner, back, True)


@register_jitable
def _before(x: Any, dx: Any, first: int, lines: int, n: int, so_far: Any) -> None:
    """dx = the products of what comes before each number, of lines side by side."""
    so_far[:] = 1
    for k in range(n):
        for c in range(lines):
            at = (first + c) * n + k
            dx[u(at)] = so_far[u(c)]
            so_far[u(c)] *= x[u(at)]


@register_jitable
def _slopes(x: Any, g: Any, dx: Any, lines: int, n: int, whole: bool) -> None:
    """The product of what comes before k, times s_k = g_k + x_{k+1} s_{k+1}; of the `whole` product, s_k is what comes after k,
    times the line's number in g."""
    so_far = np.empty(LANES, x.dtype)
    for first in range(0, lines, LANES):
        width = min(LANES, lines - first)
        _before(x, dx, first, width, n, so_far)
        for k in range(n - 1, -1, -1):
            for c in range(width):
                at = (first + c) * n + k
                if k == n - 1:
                    so_far[u(c)] = g[u(first + c if whole else at)]
                else:
                    further = x[u(at + 1)] * so_far[u(c)]
                    so_far[u(c)] = further if whole else g[u(at)] + further
                dx[u(at)] *= so_far[u(c)]


def cumprod_gradient(x: Any, g: Any, dx: Any, lines: int, n: int) -> None:
    _slopes(x, g, dx, lines, n, False)


def prod_gradient(x: Any, g: Any, dx: Any, lines: int, n: int) -> None:
    _slopes(x, g, dx, lines, n, True)


def prod(x: Any, y: Any, lines: int, n: int) -> None:
    """In float64 and in the order of the numbers, of lines side by side."""
    so_far = np.empty(LANES, np.float64)
    for first in range(0, lines, LANES):
        width = min(LANES, lines - first)
        so_far[:] = 1.0
        for k in range(n):
            for c in range(width):
                so_far[u(c)] *= x[u((first + c) * n + k)]
        for c in range(width):
            y[u(first + c)] = so_far[u(c)]


def cumextremum(x: Any, places: Any, outer: int, n: int, inner: int, smallest: int) -> None:
    """The last place at a tie; NaN wins."""
    if n == 0:
        return
    for line in range(outer * inner):
        at = line // inner * n * inner + line % inner
        best, top = 0, x[u(at)]
        for j in range(n):
            v = x[u(at)]
            further = v <= top if smallest else v >= top
            reached = (v != v) | ((top == top) & further)
            best, top = choose(reached, j, best), choose(reached, v, top)
            places[u(at)] = best
            at += inner


@register_jitable
def _key(x: Any, turned: bool) -> Any:
    """A number that grows with x: -0.0 is 0, and NaN, whatever its bits, is the largest. `turned` reverses the order."""
    wide = choose(d(x) == 0.0, 0.0, d(x))
    bits = bits_of(wide)
    bits = choose(bits >= TOP, ~bits, bits | TOP)
    bits = choose(wide != wide, MOST, bits)
    return choose(turned, ~bits, bits)


@register_jitable
def _of_rank(v: Any, n: int, r: int) -> Any:
    """The number of rank r among n, which are put in another order (Hoare's select; the middle of three that a generator
    chooses)."""
    low, high, random = 0, n - 1, np.uint64(1)
    while low < high:
        span = np.uint64(high - low + 1)
        random = random * STEP + ADDED
        a = v[low + np.int64((random >> HIGH) % span)]
        random = random * STEP + ADDED
        b = v[low + np.int64((random >> HIGH) % span)]
        random = random * STEP + ADDED
        c = v[low + np.int64((random >> HIGH) % span)]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while v[u(i)] < pivot:
                i += 1
            while v[u(j)] > pivot:
                j -= 1
            if i <= j:
                v[u(i)], v[u(j)] = v[u(j)], v[u(i)]
                i += 1
                j -= 1
        if r <= j:
            high = j
        elif r >= i:
            low = i
        else:
            break
    return v[r]


def place_of_rank(x: Any, ranks: Any, places: Any, lines: int, n: int) -> int:
    """As a stable sort would say."""
    keys = np.empty(n, np.uint64)
    for line in range(lines):
        rank, first = ranks[line], line * n
        if rank < 0 or rank >= n:
            return 2
        for j in range(n):
            keys[u(j)] = _key(x[u(first + j)], False)
        wanted, left, at = _of_rank(keys, n, rank), rank, -1
        for j in range(n):
            left -= choose(_key(x[u(first + j)], False) < wanted, 1, 0)
        while left >= 0:
            at += 1
            if _key(x[u(first + at)], False) == wanted:
                left -= 1
        places[line] = at
    return 0


def smallest(x: Any, places: Any, lines: int, n: int, k: int, largest: int) -> int:
    """Of each line, in the order of their places, the first ones of equal numbers."""
    if k > n:
        return 2
    if k == 0:
        return 0
    room = min(2 * k + 64, n)
    keys, some = np.empty(n, np.uint64), np.empty(room, np.uint64)
    for line in range(lines):
        most, kept = MOST, 0
        for j in range(n):
            keys[u(j)] = _key(x[u(line * n + j)], largest != 0)
        for j in range(n):
            if keys[u(j)] > most:
                continue
            if kept == room:
                most, kept = _of_rank(some, kept, k - 1), k
                if keys[u(j)] > most:
                    continue
            some[u(kept)] = keys[u(j)]
            kept += 1
        most, equal, to = _of_rank(some, kept, k - 1), k, line * k
        for j in range(kept):
            equal -= choose(some[u(j)] < most, 1, 0)
        for j in range(n):
            if keys[u(j)] < most or (keys[u(j)] == most and equal > 0):
                equal -= choose(keys[u(j)] == most, 1, 0)
                places[u(to)] = j
                to += 1
    return 0


def gather(x: Any, index: Any, y: Any, outer: int, n: int, inner: int, m: int) -> int:
    wrong = n <= 0 and outer * m * inner > 0
    for line in range(0 if wrong else outer):
        to = line * m * inner
        for _ in range(m):
            for i in range(inner):
                at = index[u(to)]
                outside = (at < 0) | (at >= n)
                wrong |= outside
                y[u(to)] = x[u((line * n + choose(outside, 0, at)) * inner + i)]
                to += 1
    return 2 if wrong else 0


def scatter(x: Any, index: Any, source: Any, outer: int, n: int, inner: int, m: int, add: int) -> int:
    for line in range(outer):
        from_ = line * m * inner
        for _ in range(m):
            for i in range(inner):
                at = index[u(from_)]
                if at < 0 or at >= n:
                    return 2
                to = (line * n + at) * inner + i
                if add:
                    x[u(to)] += source[u(from_)]
                else:
                    x[u(to)] = source[u(from_)]
                from_ += 1
    return 0


def triangle(x: Any, y: Any, matrices: int, rows: int, columns: int, diagonal: int, upper: int) -> None:
    """0 above the diagonal that begins at column `diagonal`, or below it (`upper`)."""
    for row in range(matrices * rows):
        first, edge = row * columns, row % rows + diagonal + (0 if upper else 1)
        edge = max(0, min(edge, columns))
        for i in range(edge):
            y[u(first + i)] = 0 if upper else x[u(first + i)]
        for i in range(edge, columns):
            y[u(first + i)] = x[u(first + i)] if upper else 0
