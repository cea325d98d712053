"""Windows of planes as in native/pool.c and native/window_sum.c: largest values (the same bits), and sums in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array
from mpitrain.kernels.loops.mathematics import choose, u
from mpitrain.kernels.loops.typed import loop
from mpitrain.kernels.pool import NOWHERE, Side


@loop("x y int32+ int32 int32 int32 int32 i i i i i")
def _maximum(x: Any, y: Any, where: Any, y0: Any, y1: Any, x0: Any, x1: Any, planes: int, height: int, width: int, relu: int,
             widest: int) -> None:
    rows, columns = y0.size, x0.size
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


def _bounds(rows: Side, columns: Side) -> tuple[Array, ...]:
    return *rows.bounds, *columns.bounds


def window_maximum(x: Array, rows: Side, columns: Side, relu: bool = False) -> tuple[Array, Array]:
    x = np.ascontiguousarray(x)
    y = np.empty((*x.shape[:2], len(rows.starts), len(columns.starts)), x.dtype)
    where = np.empty(y.shape, np.int32)
    _maximum(x, y, where, *_bounds(rows, columns), x.shape[0] * x.shape[1], rows.size, columns.size, relu, columns.widest)
    return y, where


@loop("x int32 y i i i")
def _maximum_gradient(grad: Any, where: Any, dx: Any, planes: int, pixels: int, windows: int) -> None:
    dx[:] = 0
    for plane in range(planes):
        for i in range(plane * windows, (plane + 1) * windows):
            if where[i] != NOWHERE:
                dx[plane * pixels + where[i]] += grad[i]


def window_maximum_gradient(grad: Array, where: Array, rows: Side, columns: Side) -> Array:
    n, c = grad.shape[:2]
    result = np.empty((n, c, rows.size, columns.size), grad.dtype)
    _maximum_gradient(np.ascontiguousarray(grad), np.ascontiguousarray(where), result, n * c, rows.size * columns.size,
                      len(rows.starts) * len(columns.starts))
    return result


@loop("x y int32 int32 int32 int32 i i i")
def _total(x: Any, y: Any, y0: Any, y1: Any, x0: Any, x1: Any, planes: int, height: int, width: int) -> None:
    sums, rows, columns = np.empty(width), y0.size, x0.size
    for plane in range(planes):
        for i in range(rows):
            sums[:] = 0
            for r in range(y0[i], y1[i]):
                first = (plane * height + r) * width
                for k in range(width):
                    sums[k] += x[u(first + k)]
            for j in range(columns):
                total = 0.0
                for k in range(x0[j], x1[j]):
                    total += sums[k]
                y[u((plane * rows + i) * columns + j)] = total


def window_total(x: Array, rows: Side, columns: Side) -> Array:
    x = np.ascontiguousarray(x)
    y = np.empty((*x.shape[:2], len(rows.starts), len(columns.starts)), x.dtype)
    _total(x, y, *_bounds(rows, columns), x.shape[0] * x.shape[1], rows.size, columns.size)
    return y


@loop("x y int32 int32 int32 int32 i i i")
def _total_gradient(grad: Any, dx: Any, y0: Any, y1: Any, x0: Any, x1: Any, planes: int, height: int, width: int) -> None:
    dx[:] = 0
    rows, columns = y0.size, x0.size
    for plane in range(planes):
        for i in range(rows):
            for j in range(columns):
                g = grad[(plane * rows + i) * columns + j]
                for r in range(y0[i], y1[i]):
                    first = (plane * height + r) * width
                    for k in range(x0[j], x1[j]):
                        dx[u(first + k)] += g


def window_total_gradient(grad: Array, rows: Side, columns: Side) -> Array:
    n, c = grad.shape[:2]
    result = np.empty((n, c, rows.size, columns.size), grad.dtype)
    _total_gradient(np.ascontiguousarray(grad), result, *_bounds(rows, columns), n * c, rows.size, columns.size)
    return result
