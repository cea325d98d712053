"""Largest values and sums over windows of planes: fixed, padded and adaptive pooling are one loop.

A grid of windows is two pairs of index lists: output (i, j) looks at rows [y0[i], y1[i]) and columns [x0[j], x1[j]) of its
plane, all inside the plane. Taking every stride-th pixel is here too: windows of one pixel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpitrain.backend import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host, misfit, packed

NUMBERED = 1 << 31                                # pixels of a plane have numbers of 32 bits
NOWHERE = -1                                      # the place of a largest value that ReLU made 0: no gradient goes there


@dataclass(frozen=True)
class Side:
    """The windows along one dim: window i is [starts[i], stops[i]) of `size` positions."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    size: int

    @property
    def count(self) -> int:
        return len(self.starts)

    @cached_property
    def widest(self) -> int:
        return max((b - a for a, b in zip(self.starts, self.stops)), default=0)

    @cached_property
    def narrowest(self) -> int:
        return min((b - a for a, b in zip(self.starts, self.stops)), default=0)

    @cached_property
    def bounds(self) -> tuple[Array, Array]:
        """Starts and stops, for C; ShapeError where a window is not inside."""
        if not all(0 <= a <= b <= self.size for a, b in zip(self.starts, self.stops, strict=True)):
            misfit(f"pooling of {self.size} positions", self.starts, self.stops)
        return np.array(self.starts, np.int32), np.array(self.stops, np.int32)

    @cached_property
    def pairs(self) -> bool:
        """Is window i [2 i, 2 i + 2)?"""
        return all((a, b) == (2 * i, 2 * i + 2) for i, (a, b) in enumerate(zip(self.starts, self.stops)))


def _steps(rows: Side, columns: Side, xp: Any) -> Iterator[tuple[Array, Array, Array]]:
    """For each step (dy, dx) inside the widest window: row and column of it in each window, and whether it is inside."""
    (y0, y1), (x0, x1) = ((xp.asarray(side.starts), xp.asarray(side.stops)) for side in (rows, columns))
    for dy in range(rows.widest):
        for dx in range(columns.widest):
            y, x = y0 + dy, x0 + dx
            yield xp.minimum(y, rows.size - 1), xp.minimum(x, columns.size - 1), (y < y1)[:, None] & (x < x1)[None, :]


def _maximum(x: Array, rows: Side, columns: Side, relu: bool = False) -> tuple[Array, Array]:
    xp = array_module(x)
    best: Any = None
    where: Any = None
    for y, c, is_inside in _steps(rows, columns, xp):
        value = x[:, :, y[:, None], c[None, :]]
        at = (y[:, None] * columns.size + c[None, :]).astype(xp.int32)
        if best is None:                              # every window holds its first position
            best, where = value, xp.broadcast_to(at, value.shape).copy()
            continue
        better = is_inside & ((value > best) | (xp.isnan(value) & ~xp.isnan(best)))
        best, where = xp.where(better, value, best), xp.where(better, at, where)
    if relu:
        return xp.maximum(best, best.dtype.type(0)), xp.where(best <= 0, xp.int32(NOWHERE), where)
    return best, where


def _total(x: Array, rows: Side, columns: Side) -> Array:
    xp = array_module(x)
    result = xp.zeros((*x.shape[:2], len(rows.starts), len(columns.starts)), xp.float64)     # a window may be a whole plane
    for y, c, is_inside in _steps(rows, columns, xp):
        result += xp.where(is_inside, x[:, :, y[:, None], c[None, :]], x.dtype.type(0))
    return result.astype(x.dtype)


def _maximum_gradient(grad: Array, where: Array | None, rows: Side, columns: Side) -> Array:
    xp = array_module(grad)
    result = xp.zeros((*grad.shape[:2], rows.size, columns.size), grad.dtype)
    for y, x, chosen in _steps(rows, columns, xp):
        if where is not None:
            chosen = chosen & (where == y[:, None] * columns.size + x[None, :])
        # Products with 0 and 1: adaptive windows may start at one place twice, and a scatter-add on a GPU has no fixed order.
        down = (xp.arange(rows.size)[:, None] == y).astype(grad.dtype)
        across = (x[:, None] == xp.arange(columns.size)).astype(grad.dtype)
        result += down @ xp.where(chosen, grad, grad.dtype.type(0)) @ across
    return result


def _total_gradient(grad: Array, rows: Side, columns: Side) -> Array:
    return _maximum_gradient(grad, None, rows, columns)


def _sizes(planes: int, rows: Side, columns: Side) -> tuple[int, ...]:
    if rows.size * columns.size >= NUMBERED:
        misfit(f"pooling of images of less than {NUMBERED} pixels", (rows.size, columns.size))
    return planes, rows.size, columns.size, len(rows.starts), len(columns.starts)


def _check(name: str, x: Array, size: tuple[int, int]) -> None:
    if x.shape[2:] != size:
        misfit(name, x, size)


@host("pool", "maximum", "X:phw X!:pab I!:pab I:a I:a I:b I:b ip ih iw ia ib i")
def _maximum_host(function: CFunction, x: Array, rows: Side, columns: Side, relu: bool = False) -> tuple[Array, Array]:
    n, c = x.shape[:2]
    _check("window_maximum", x, (rows.size, columns.size))
    if (rows.starts and rows.narrowest < 1) or (columns.starts and columns.narrowest < 1):
        misfit("window_maximum of empty windows", rows.starts, rows.stops, columns.starts, columns.stops)
    y = np.empty((n, c, len(rows.starts), len(columns.starts)), x.dtype)
    where = np.empty(y.shape, np.int32)
    function(packed(x), y, where, *rows.bounds, *columns.bounds, *_sizes(n * c, rows, columns), relu)
    return y, where


@host("pool", "maximum_gradient", "X:pab I:pab X!:phw ip ih iw ia ib i")
def _maximum_gradient_host(function: CFunction, grad: Array, where: Array, rows: Side, columns: Side) -> Array:
    n, c = grad.shape[:2]
    _check("window_maximum_gradient", grad, (len(rows.bounds[0]), len(columns.bounds[0])))
    result = np.empty((n, c, rows.size, columns.size), grad.dtype)
    function(packed(grad), where, result, *_sizes(n * c, rows, columns), rows.pairs and columns.pairs)
    return result


@host("window_sum", "total", "X:phw X!:pab I:a I:a I:b I:b ip ih iw ia ib")
def _total_host(function: CFunction, x: Array, rows: Side, columns: Side) -> Array:
    n, c = x.shape[:2]
    _check("window_total", x, (rows.size, columns.size))
    y = np.empty((n, c, len(rows.starts), len(columns.starts)), x.dtype)
    function(packed(x), y, *rows.bounds, *columns.bounds, *_sizes(n * c, rows, columns))
    return y


@host("window_sum", "total_gradient", "X:pab X!:phw I:a I:a I:b I:b ip ih iw ia ib")
def _total_gradient_host(function: CFunction, grad: Array, rows: Side, columns: Side) -> Array:
    n, c = grad.shape[:2]
    _check("window_total_gradient", grad, (len(rows.starts), len(columns.starts)))
    result = np.empty((n, c, rows.size, columns.size), grad.dtype)
    function(packed(grad), result, *rows.bounds, *columns.bounds, *_sizes(n * c, rows, columns))
    return result


window_maximum = Kernel("window_maximum", _maximum, _maximum_host, _maximum_host.loop("pool"))
"""(largest, where in the plane as int32), both (N, C, OH, OW), from (x (N, C, H, W), rows, columns, relu or nothing). With relu
what is 0 or less becomes 0, and is NOWHERE."""

window_maximum_gradient = Kernel("window_maximum_gradient", _maximum_gradient, _maximum_gradient_host,
                                 _maximum_gradient_host.loop("pool"))
"""(N, C, H, W) from (gradient (N, C, OH, OW), where, rows, columns)."""

window_total = Kernel("window_total", _total, _total_host, _total_host.loop("pool"))
"""The sum over each window: (N, C, OH, OW) from (x (N, C, H, W), rows, columns)."""

window_total_gradient = Kernel("window_total_gradient", _total_gradient, _total_gradient_host,
                               _total_gradient_host.loop("pool"))
"""The adjoint of `window_total`: (N, C, H, W) from (gradient (N, C, OH, OW), rows, columns)."""


def _subsample(x: Array, stride: int, before: int, after: int) -> Array:
    return array_module(x).pad(x[:, :, ::stride, ::stride], [(0, 0), (before, after), (0, 0), (0, 0)])


def _subsample_gradient(grad: Array, shape: tuple[int, ...], stride: int, before: int) -> Array:
    result = array_module(grad).zeros(shape, grad.dtype)
    result[:, :, ::stride, ::stride] = grad[:, before:before + shape[1]]
    return result


@host("subsample", "subsample", "X:nchw X!:nboq+ncoq+naoq in ic ih iw io iq i ib ia")
def _subsample_host(function: CFunction, x: Array, stride: int, before: int, after: int) -> Array:
    n, c, h, w = x.shape
    if stride < 1:
        misfit(f"subsample of stride {stride}", x)
    y = np.empty((n, before + c + after, -(-h // stride), -(-w // stride)), x.dtype)
    function(packed(x), y, *x.shape, *y.shape[2:], stride, before, after)
    return y


@host("subsample", "subsample_gradient", "X:nboq+ncoq+naoq X!:nchw in ic ih iw io iq i ib ia")
def _subsample_gradient_host(function: CFunction, grad: Array, shape: tuple[int, ...], stride: int, before: int) -> Array:
    if stride < 1 or grad.shape[2:] != (-(-shape[2] // stride), -(-shape[3] // stride)):
        misfit(f"subsample_gradient of stride {stride}", grad, shape)
    result = np.empty(shape, grad.dtype)
    function(packed(grad), result, *shape, *grad.shape[2:], stride, before, grad.shape[1] - before - shape[1])
    return result


subsample = Kernel("subsample", _subsample, _subsample_host, _subsample_host.loop("pool"))
"""(N, before + C + after, OH, OW) from (x (N, C, H, W), stride, before, after)."""

subsample_gradient = Kernel("subsample_gradient", _subsample_gradient, _subsample_gradient_host,
                            _subsample_gradient_host.loop("pool"))
"""(N, C, H, W) from (gradient of that, shape of x, stride, before)."""


def prepared_maximum(shape: tuple[int, ...], dtype: Any, rows: Side, columns: Side, relu: bool = False) -> Any:
    """The largest values of windows of images of one shape and dtype, as a function of the images; None where nothing is compiled
    for them."""
    version = window_maximum.host()
    if version is None or 0 in shape or shape[2:] != (rows.size, columns.size) or min(rows.narrowest, columns.narrowest) < 1:
        return None
    function, made = version.args[0], (*shape[:2], rows.count, columns.count)         # type: ignore[attr-defined]
    where, rest = np.empty(made, np.int32), (*rows.bounds, *columns.bounds, *_sizes(shape[0] * shape[1], rows, columns), relu)

    def run(x: Array) -> Array:
        y = np.empty(made, dtype)
        function(packed(x), y, where, *rest)
        return y
    return run
