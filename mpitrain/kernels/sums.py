"""Sums over dims that lose no digits where there are many terms.

NumPy adds the rows of a matrix one after the other: at a million rows of float32 that is wrong in the third digit or so, while
sums along memory are made in halves. These are NumPy's to the bit, in C eight parts at a time. A sum over more than `ROWS` rows
is made of blocks, and so is a layer's gradient of its bias over more than `EXACT`; one over fewer rows has NumPy's bits.
"""

from __future__ import annotations

from math import prod

import numpy as np

from mpitrain.backend.dtype import is_half
from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host

IN_C = (np.dtype("float32"), np.dtype("float64"))
EXACT = 4096                                      # rows of a layer's gradient; their order is part of the bits of a run
ROWS = 128                                        # of any other sum: at 1,000 rows NumPy's order has 9 times the error of blocks
BLOCK = 64                                        # column_sums.c's


def _column_sums(x: Array, out: Array) -> Array:
    whole = len(x) // BLOCK * BLOCK
    total = x[:whole].reshape(-1, BLOCK, x.shape[1]).sum(axis=1).sum(axis=0, dtype="float64")
    if whole < len(x):
        total += x[whole:].sum(axis=0)
    out[...] = total
    return out


@host("column_sums", "column_sums", "X:rn X!:n ir in")
def _column_sums_host(call: CFunction, x: Array, out: Array) -> Array:
    made = out if out.flags.c_contiguous and out.dtype == x.dtype else np.empty(out.shape, x.dtype)
    call(np.ascontiguousarray(x), made, *x.shape)
    if made is not out:
        out[...] = made
    return out


column_sums = Kernel("column_sums", _column_sums, _column_sums_host, _column_sums_host.loop("sums"))
"""Writes the sums over the rows of x (R, D), R and D more than 1, into `out` (D,), and returns it."""


def _row_sums(x: Array) -> Array:
    return x.sum(axis=1)


@host("row_sums", "row_sums", "X:rn X!:r ir in")
def _row_sums_host(call: CFunction, x: Array) -> Array:
    sums = np.empty(len(x), x.dtype)
    call(np.ascontiguousarray(x), sums, *x.shape)
    return sums


row_sums = Kernel("row_sums", _row_sums, host=_row_sums_host)
"""``x.sum(axis=1)`` of x (R, D) without gaps, to the bit."""


def sum_rows(x: Array, out: Array | None = None) -> Array:
    """The sums over the rows of a matrix, in `out` where given: of up to `EXACT` rows one after the other."""
    if is_half(x.dtype):
        return _of_half(x, out)
    return x.sum(axis=0, out=out) if len(x) <= EXACT else _in_blocks(x, out)


def _of_half(x: Array, out: Array | None) -> Array:
    """The sums over the rows of a matrix of 16 bits, in float32 where `out` does not say otherwise."""
    made = array_module(x).empty(x.shape[1], "float32") if out is None else out
    if x.size:
        return column_sums(x, made)
    made[...] = 0
    return made


def _in_blocks(x: Array, out: Array | None = None) -> Array:
    """The same, however few rows there are."""
    if not x.size or x.dtype not in IN_C or (x.shape[1] == 1 and not x.flags.c_contiguous):
        return x.sum(axis=0, out=out)
    if x.shape[1] != 1:
        return column_sums(x, array_module(x).empty(x.shape[1], x.dtype) if out is None else out)
    sums = row_sums(x.reshape(1, -1))
    if out is None:
        return sums
    out[...] = sums
    return out


def sum_over(x: Array, dims: tuple[int, ...] | int | None, keepdims: bool = False) -> Array:
    """``x.sum(dims)``, in blocks where that adds up more than `ROWS` numbers that lie apart in memory; a new array. Of
    16 bits, in float32."""
    if x.size <= ROWS or x.dtype not in IN_C:
        return x.sum(axis=dims, keepdims=keepdims, dtype="float32" if is_half(x.dtype) else None)
    gapless = x.flags.c_contiguous or x.flags.f_contiguous
    if dims is None and gapless:
        return x.sum(keepdims=keepdims) if x.size <= EXACT else \
            row_sums(x.reshape(1, -1, order="A")).reshape((1,) * x.ndim if keepdims else ())
    gone = {dim % x.ndim for dim in (range(x.ndim) if dims is None else dims if isinstance(dims, tuple) else (dims,))}
    if x.size <= EXACT and prod([x.shape[dim] for dim in gone]) <= ROWS:
        return x.sum(axis=dims, keepdims=keepdims)            # small: soon done
    shape = [1 if dim in gone else n for dim, n in enumerate(x.shape) if keepdims or dim not in gone]
    order = sorted([dim for dim, n in enumerate(x.shape) if n != 1], key=lambda dim: -abs(x.strides[dim]))      # as they lie
    last = len(order)
    while last and order[last - 1] in gone:
        last -= 1
    if last == len(order) and not gone.intersection(order):
        return (x + x.dtype.type(0)).reshape(shape)           # a sum of one number; that of -0 is 0
    if gapless and not gone.intersection(order[:last]):
        return _along_memory(x, order, last).reshape(shape)
    if last < len(order) - 1 and not gapless:
        last = len(order) - 1                     # NumPy adds along one dim in halves, and over the others row by row
    outer = [dim for dim in order[:last] if dim in gone]
    rows = prod([x.shape[dim] for dim in outer])
    if rows <= ROWS:
        return x.sum(axis=dims, keepdims=keepdims)
    matrix = x.transpose(outer + [dim for dim in range(x.ndim) if dim not in outer]).reshape(rows, -1)
    result = _in_blocks(matrix).reshape([1 if dim in outer else n for dim, n in enumerate(x.shape)])
    return result.sum(axis=tuple(gone)).reshape(shape)


def _along_memory(x: Array, order: list[int], last: int) -> Array:
    """The sums over the dims order[last:], which lie behind all others in memory."""
    stays = [x.shape[dim] for dim in order[:last]]
    sums = row_sums(x.transpose(order + [dim for dim in range(x.ndim) if dim not in order]).reshape(prod(stays), -1))
    return sums.reshape(stays).transpose([order[:last].index(dim) for dim in sorted(order[:last])])
