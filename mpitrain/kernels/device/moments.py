"""Sums of rows, means and squared distances from them on a device; see kernels/sums.py and kernels/variances.py."""

from __future__ import annotations

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, computed, contiguous, over
from mpitrain.kernels.device.rows import by_rows

SOURCE, WIDE = Source("moments"), 256                                 # row.h's ROW_THREADS
SPAN, BLOCKS = 1 << 14, 1024           # numbers of a row that one block adds; blocks that fill a device
_row_chunks = SOURCE.function("row_chunks", "X:rn S!:rc ir in ic i")
_row_totals = SOURCE.function("row_totals", "X!:r S:rc ir ic")
_moment_chunks = SOURCE.function("moment_chunks", "X:arn D?:an D!:acn ia ir in ic i")
_moment_totals = SOURCE.function("moment_totals", "D!:an D:acn d ia ic in")


@device("row_sums")
def row_sums(x: Array) -> Array:
    x, xp = contiguous(x), array_module(x)
    rows, columns = x.shape
    chunks = max(1, -(-columns // SPAN))
    partial, sums = xp.empty((rows, chunks), computed(x.dtype)), xp.empty(rows, x.dtype)
    if rows:
        _row_chunks(*by_rows(rows * chunks, x.nbytes), x, partial, rows, columns, chunks, SPAN)
        _row_totals(*by_rows(rows, partial.nbytes), sums, partial, rows, chunks)
    return sums


@device("variances")
def variances(x: Array) -> tuple[Array, Array]:
    """Chunks are as small as it takes to have `BLOCKS` of them, but of 64 rows at least: each sum is written and read again."""
    x, xp = contiguous(x), array_module(x)
    outer, rows, n = x.shape
    means, squares = xp.empty((outer, n), "float64"), xp.empty((outer, n), "float64")
    if not means.size:
        return means, squares
    span = max(64, -(-rows * outer // BLOCKS)) if n > 1 else SPAN
    chunks = max(1, -(-rows // span))
    partial = xp.empty((outer, chunks, n), "float64")
    grid, threads = by_rows(outer * chunks, 8 * x.size)
    for made, about, divisor in ((means, None, rows), (squares, means, 1)):
        _moment_chunks(grid, threads, x, about, partial, outer, rows, n, chunks, span)
        _moment_totals(over(means.size, WIDE, 1 << 31), WIDE, made, partial, divisor, outer, chunks, n)
    return means, squares
