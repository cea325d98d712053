"""Windows of planes as in native/pool.c and native/window_sum.c: largest values (the same bits), and sums in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.kernels.loops.mathematics import choose, u
from mpitrain.kernels.loops.runs import NEAR, bring, every_second
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


def subsample(x: Any, y: Any, n: int, c: int, height: int, width: int, rows: int, columns: int, stride: int, before: int,
              after: int) -> None:
    plane, all_ = rows * columns, before + c + after
    for image in range(n):
        for p in range(all_):
            to, inside = (image * all_ + p) * plane, before <= p < before + c
            for i in range(0 if inside else plane):
                y[u(to + i)] = x.dtype.type(0)
            for i in range(rows if inside else 0):
                first = ((image * c + p - before) * height + i * stride) * width
                if stride == 2:
                    bring(x, first + NEAR * stride, (width * x.itemsize + 63) // 64)
                    every_second(x, first, y, to + i * columns, columns)
                else:
                    for j in range(columns):
                        y[u(to + i * columns + j)] = x[u(first + j * stride)]


def subsample_gradient(grad: Any, dx: Any, n: int, c: int, height: int, width: int, rows: int, columns: int, stride: int,
                       before: int, after: int) -> None:
    all_ = before + c + after
    for image in range(n):
        for p in range(c):
            to, first = (image * c + p) * height * width, (image * all_ + before + p) * rows * columns
            for i in range(height * width):
                dx[u(to + i)] = grad.dtype.type(0)
            for i in range(rows):
                for j in range(columns):
                    dx[u(to + i * stride * width + j * stride)] = grad[u(first + i * columns + j)]
