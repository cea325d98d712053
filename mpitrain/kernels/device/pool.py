"""Pooling on a device; see kernels/pool.py. The bounds of windows go up once for each device, and stay there."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, contiguous, over
from mpitrain.kernels.library import misfit
from mpitrain.kernels.pool import NUMBERED, Side, _check, _sizes

SOURCE, WIDE = Source("pool"), 256                                    # pool.cu's WIDE
LARGE = 16                                                            # pixels of a window from which a warp has it
WINDOWS = "I:2a+2h I:2b+2w in ih iw ia ib"
_largest = SOURCE.function("largest", f"X:nhw X!:nab I!:nab {WINDOWS} i")
_largest_gradient = SOURCE.function("largest_gradient", f"X:nab I:nab X!:nhw {WINDOWS}")
_total, _large_total = (SOURCE.function(name, f"X:nhw X!:nab {WINDOWS}") for name in ("total", "large_total"))
_total_gradient = SOURCE.function("total_gradient", f"X:nab X!:nhw {WINDOWS}")
_subsample = SOURCE.function("subsample", "X:nchw X!:nlab in ic ih iw ia ib il i i")
_subsample_gradient = SOURCE.function("subsample_gradient", "X:nlab X!:nchw in ic ih iw ia ib il i i")


def table_of(side: Side) -> np.ndarray[Any, Any]:
    """The starts and ends of windows, and of each position the first window that sees it and the one behind the last, int32."""
    starts, stops = Side(side.starts, side.stops, side.size).bounds       # of a new one, which nobody keeps
    first, behind = np.full(side.size, side.count, np.int32), np.zeros(side.size, np.int32)
    for i, (a, b) in enumerate(zip(side.starts, side.stops)):
        first[a:b] = np.minimum(first[a:b], i)
        behind[a:b] = i + 1
    return np.concatenate([starts, stops, first, behind])


@cache
def _kept(side: Side, xp: Any, ordinal: int) -> Array:
    """For good, since a captured graph may read it."""
    return xp.asarray(table_of(side))


def _tables(xp: Any, *sides: Side) -> tuple[Array, ...]:
    """`table_of` of each, on the current device."""
    ordinal = xp.cuda.Device().id if hasattr(xp, "cuda") else 0
    return tuple(_kept(side, xp, ordinal) for side in sides)


@device("window_maximum")
def window_maximum(x: Array, rows: Side, columns: Side, relu: bool = False) -> tuple[Array, Array]:
    xp, (n, c), x = array_module(x), x.shape[:2], contiguous(x)
    _check("window_maximum", x, (rows.size, columns.size))
    if (rows.starts and rows.narrowest < 1) or (columns.starts and columns.narrowest < 1):
        misfit("window_maximum of empty windows", rows.starts, rows.stops, columns.starts, columns.stops)
    y = xp.empty((n, c, rows.count, columns.count), x.dtype)
    where = xp.empty(y.shape, "int32")
    _largest(over(y.size), WIDE, x, y, where, *_tables(xp, rows, columns), *_sizes(n * c, rows, columns), relu)
    return y, where


@device("window_maximum_gradient")
def window_maximum_gradient(grad: Array, where: Array, rows: Side, columns: Side) -> Array:
    xp, (n, c) = array_module(grad), grad.shape[:2]
    _check("window_maximum_gradient", grad, (rows.count, columns.count))
    result = xp.empty((n, c, rows.size, columns.size), grad.dtype)
    _largest_gradient(over(result.size), WIDE, contiguous(grad), contiguous(where), result, *_tables(xp, rows, columns),
                      *_sizes(n * c, rows, columns))
    return result


@device("window_total")
def window_total(x: Array, rows: Side, columns: Side) -> Array:
    xp, (n, c) = array_module(x), x.shape[:2]
    _check("window_total", x, (rows.size, columns.size))
    y = xp.empty((n, c, rows.count, columns.count), x.dtype)
    large = rows.widest * columns.widest >= LARGE
    run, threads = (_large_total, 32 * y.size) if large else (_total, y.size)
    run(over(threads), WIDE, contiguous(x), y, *_tables(xp, rows, columns), *_sizes(n * c, rows, columns))
    return y


@device("window_total_gradient")
def window_total_gradient(grad: Array, rows: Side, columns: Side) -> Array:
    xp, (n, c) = array_module(grad), grad.shape[:2]
    _check("window_total_gradient", grad, (rows.count, columns.count))
    result = xp.empty((n, c, rows.size, columns.size), grad.dtype)
    _total_gradient(over(result.size), WIDE, contiguous(grad), result, *_tables(xp, rows, columns), *_sizes(n * c, rows, columns))
    return result


@device("subsample")
def subsample(x: Array, stride: int, before: int, after: int) -> Array:
    n, c, h, w = x.shape
    if stride < 1:
        misfit(f"subsample of stride {stride}", x)
    if (before + c + after) * h * w >= NUMBERED:
        misfit(f"subsample of images of less than {NUMBERED} numbers", x)
    y = array_module(x).empty((n, before + c + after, -(-h // stride), -(-w // stride)), x.dtype)
    _subsample(over(y.size), WIDE, contiguous(x), y, *x.shape, *y.shape[2:], y.shape[1], stride, before)
    return y


@device("subsample_gradient")
def subsample_gradient(grad: Array, shape: tuple[int, ...], stride: int, before: int) -> Array:
    if stride < 1 or grad.shape[2:] != (-(-shape[2] // stride), -(-shape[3] // stride)) or grad.shape[1] < before + shape[1]:
        misfit(f"subsample_gradient of stride {stride}", grad, shape)
    if grad.shape[1] * shape[2] * shape[3] >= NUMBERED:
        misfit(f"subsample_gradient of images of less than {NUMBERED} numbers", grad, shape)
    result = array_module(grad).empty(shape, grad.dtype)
    _subsample_gradient(over(result.size), WIDE, contiguous(grad), result, *shape, *grad.shape[2:], grad.shape[1], stride, before)
    return result
