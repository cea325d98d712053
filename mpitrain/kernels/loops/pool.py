"""Windows of planes as in native/pool.c and native/window_sum.c: largest values (the same bits), and sums in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.kernels.loops.mathematics import choose, u
from mpitrain.kernels.pool import NOWHERE


def maximum(x: Any, y: Any, where: Any, y0: Any, y1: Any, x0: Any, x1: Any, planes: int, height: int, width: int, rows: int,
            columns: int, relu: int) -> None:
    widest = 0
    for j in range(columns):
        widest = max(widest, x1[j] - x0[j])
    for plane in range(planes):
        first = plane * height * width
        for i in range(rows):
            to = (plane * rows + i) * columns
            for j in range(columns):
                where[u(to + j)] = y0[i] * width + x0[j]
                y[u(to + j)] = x[u(first + y0[i] * width + x0[j])]
            for r in range(y0[i], y1[i]):
                for step in range(widest):
                    for j in range(columns):      # a narrower window sees its last column again, which changes nothing
                        at = r * width + min(x0[j] + step, x1[j] - 1)
                        value, best = x[u(first + at)], y[u(to + j)]
                        takes = (value > best) | ((value != value) & (best == best))
                        y[u(to + j)] = choose(takes, value, best)
                        where[u(to + j)] = choose(takes, np.int32(at), where[u(to + j)])
            if relu:
                for j in range(columns):
                    where[u(to + j)] = choose(y[u(to + j)] <= 0, np.int32(NOWHERE), where[u(to + j)])
                    y[u(to + j)] = choose(y[u(to + j)] < 0, x.dtype.type(0), y[u(to + j)])


def maximum_gradient(grad: Any, where: Any, dx: Any, planes: int, height: int, width: int, rows: int, columns: int,
                     pairs: int) -> None:
    dx[:] = 0
    pixels, windows = height * width, rows * columns
    for plane in range(planes):
        for i in range(plane * windows, (plane + 1) * windows):
            if 0 <= where[i] < pixels:            # not NOWHERE
                dx[plane * pixels + where[i]] += grad[i]


def total(x: Any, y: Any, y0: Any, y1: Any, x0: Any, x1: Any, planes: int, height: int, width: int, rows: int,
          columns: int) -> None:
    sums = np.empty(width)
    for plane in range(planes):
        for i in range(rows):
            sums[:] = 0
            for r in range(y0[i], y1[i]):
                first = (plane * height + r) * width
                for k in range(width):
                    sums[k] += x[u(first + k)]
            for j in range(columns):
                found = 0.0
                for k in range(x0[j], x1[j]):
                    found += sums[k]
                y[u((plane * rows + i) * columns + j)] = found


def total_gradient(grad: Any, dx: Any, y0: Any, y1: Any, x0: Any, x1: Any, planes: int, height: int, width: int, rows: int,
                   columns: int) -> None:
    dx[:] = 0
    for plane in range(planes):
        for i in range(rows):
            for j in range(columns):
                g = grad[(plane * rows + i) * columns + j]
                for r in range(y0[i], y1[i]):
                    first = (plane * height + r) * width
                    for k in range(x0[j], x1[j]):
                        dx[u(first + k)] += g
