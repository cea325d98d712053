"""Products of whole numbers with weights in few bits, as in native/lowbit.c: exact sums, then the same float operations in the
same order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from mpitrain.kernels.loops.mathematics import bits_of, f, u
from mpitrain.kernels.loops.wire import n32, unpack_f
from mpitrain.kernels.lowbit import GROUP, HALF, LANES, TINY

LIMIT, INFINITE = f(127), n32(0x7F800000)


def lowbit_rows(x: Any, q: Any, scales: Any, sums: Any, m: int, k: int, padded: int, given: float) -> None:
    signed = q.view(np.int8)
    for i in range(m):
        top = n32(0)
        for r in range(k):
            size = n32(bits_of(x[u(i * k + r)]) & n32(0x7FFFFFFF))
            if size > top:
                top = size
        finite, each = top < INFINITE, given < 0
        largest = f(0)
        for r in range(k):
            size_here = abs(x[u(i * k + r)])
            if size_here > largest:
                largest = size_here
        scale = largest / LIMIT if each else f(given)
        zeros = (largest if each else scale) < f(TINY)
        inverse = f(0)
        if finite and not zeros:
            inverse = LIMIT / largest if each else f(1) / scale
        scales[i] = f(np.nan) if not finite else f(0) if zeros else scale
        total = np.int32(0)
        for r in range(padded):
            whole = f(0)
            if r < k and finite and not zeros:
                whole = np.rint(min(max(x[u(i * k + r)] * inverse, -LIMIT), LIMIT))
            signed[u(i * padded + r)] = np.int8(whole)
            total += np.int32(whole)
        sums[i] = total


def lowbit_int8_integers(x: Any, of_x: Any, sums: Any, w: Any, scales: Any, bias: Any, y: Any, m: int, n: int, k: int,
                         padded: int) -> None:
    left, right = x.view(np.int8), w.view(np.int8)
    for i in range(m):
        for j in range(n):
            total = np.int32(0)
            for r in range(k):
                total = np.int32(total + np.int32(left[u(i * padded + r)]) * np.int32(right[u(j * k + r)]))
            made = f(total) * (of_x[i] * scales[j])
            y[u(i * n + j)] = made + bias[j] if bias.size else made


@register_jitable
def eighth(x: Any, w: Any, at_x: int, at_w: int) -> Any:
    """The sum of 8 products: 4 low nibbles and 4 high ones."""
    total = np.int32(0)
    for i in range(4):
        both = np.int32(w[u(at_w + i)])
        total += ((both & np.int32(15)) - np.int32(8)) * np.int32(x[u(at_x + i)])
        total += ((both >> np.int32(4)) - np.int32(8)) * np.int32(x[u(at_x + HALF + i)])
    return total


def lowbit_int4_integers(x: Any, of_x: Any, w: Any, scales: Any, bias: Any, y: Any, m: int, n: int, k: int, groups: int,
                         padded: int) -> None:
    left, lanes = x.view(np.int8), np.empty(LANES, np.float32)
    for i in range(m):
        for j in range(n):
            lanes[:] = 0
            for g in range(groups):
                scale = unpack_f(scales[u(j * groups + g)])
                for c in range(4):
                    exact = eighth(left, w, i * padded + g * GROUP + 4 * c, (j * groups + g) * HALF + 4 * c)
                    lanes[g % 4 * 4 + c] += f(exact) * scale
            for half in (8, 4):
                for lane in range(half):
                    lanes[lane] += lanes[lane + half]
            made = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) * of_x[i]
            y[u(i * n + j)] = made + bias[j] if bias.size else made
