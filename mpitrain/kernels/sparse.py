"""Products by a sparse matrix w (N, K), in two forms, and how a matrix is brought into them.

    blocks   16 rows and a column each: `starts` (N / 16 * P + 1), `columns` (B,), `values` (B, 16); the blocks of rows 16 g to
             16 g + 15 in piece p of the columns are starts[g P + p] : starts[g P + p + 1]
    CSR      compressed sparse rows: `starts` (N P + 1), `columns` (C,), `values` (C,), of row j and piece p alike

The P pieces of the columns are the blocks of terms that `kernels.product` adds up, so with finite numbers these products have its
bits: what is left out are zeros. A row of the result has the same bits whatever batch it is part of. IndexError where starts or
columns point outside of what there is. `benchmarks/sparse.py` compares both with our products by a dense matrix.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, Scratch, host

HEIGHT, PANEL, MOST_ROWS = 16, 64, 128           # native/sparse.c's
TERMS, UNIT = 384, 8                             # native/blocks.h's TERMS and GROUP


class Sparse(NamedTuple):
    """A sparse matrix (N, K) in one of the forms."""

    starts: Array
    columns: Array
    values: Array

    @property
    def nbytes(self) -> int:
        return int(self.starts.nbytes + self.columns.nbytes + self.values.nbytes)


def piece_of(k: int) -> int:
    """The terms of each piece of k, but for the last."""
    each = math.ceil(k / max(1, math.ceil(k / TERMS)))
    return max(1, math.ceil(each / UNIT)) * UNIT


def pieces_of(k: int) -> int:
    return max(1, -(-k // piece_of(k)))


def starts_of(live: Array) -> Array:
    """Where each piece of each row begins, of marks (rows, K) of what is there."""
    size = piece_of(live.shape[1])
    counts = np.stack([live[:, p * size:(p + 1) * size].sum(axis=1) for p in range(pieces_of(live.shape[1]))], axis=1)
    return np.concatenate([[0], np.cumsum(counts.reshape(-1))]).astype(np.int64)


def live_blocks(w: Array) -> Array:
    """Marks (N / 16, K) of the blocks of w (N, K) that have a number other than 0; 16 divides N."""
    found: Array = (w.reshape(len(w) // HEIGHT, HEIGHT, w.shape[1]) != 0).any(axis=1)
    return found


def to_blocks(w: Array, live: Array | None = None) -> Sparse:
    """The blocks of w (N, K) that `live` (N / 16, K) marks (default: those with a number other than 0)."""
    live = live_blocks(w) if live is None else live
    groups, columns = np.nonzero(live)
    return Sparse(starts_of(live), columns.astype(np.int32),
                  np.ascontiguousarray(w.reshape(len(live), HEIGHT, w.shape[1])[groups, :, columns]))


def to_csr(w: Array) -> Sparse:
    """The numbers of w (N, K) other than 0, row by row."""
    rows, columns = np.nonzero(w)
    return Sparse(starts_of(w != 0), columns.astype(np.int32), np.ascontiguousarray(w[rows, columns]))


def rows_of(starts: Array, k: int) -> Array:
    """The row of each block or number."""
    xp = array_module(starts)
    pieces = pieces_of(k)
    return xp.repeat(xp.arange((len(starts) - 1) // pieces), xp.diff(starts[::pieces]).tolist())


def dense_of(starts: Array, columns: Array, values: Array, k: int) -> Array:
    """The matrix of either form, of k columns."""
    xp = array_module(values)
    tall = xp.zeros(((len(starts) - 1) // pieces_of(k), values[0:1].size if values.ndim > 1 else 1, k), values.dtype)
    tall[rows_of(starts, k), :, columns] = values.reshape(len(columns), -1)
    return tall.reshape(-1, k)


def _product(x: Array, starts: Array, columns: Array, values: Array, bias: Array | None) -> Array:
    y = array_module(x).matmul(x, dense_of(starts, columns, values, x.shape[1]).T)
    if bias is not None:
        y += bias
    return y


@host("sparse", "block_product", "X:mk L:s I:b X:b16 X?:n X!:128k X!:mn im in ik is ib", answers=True)
def _blocks_host(call: CFunction, x: Array, starts: Array, columns: Array, values: Array, bias: Array | None) -> Array:
    (m, k), n = x.shape, HEIGHT * ((len(starts) - 1) // pieces_of(x.shape[1]))
    y = np.empty((m, n), x.dtype)
    call(x, starts, columns, values, bias, _room(MOST_ROWS * k, x.dtype), y, m, n, k, len(starts), len(columns))
    return y


@host("sparse", "csr_product", "X:mk L:s I:c X:c X?:n X!:64k X!:mn im in ik is ic", answers=True)
def _csr_host(call: CFunction, x: Array, starts: Array, columns: Array, values: Array, bias: Array | None) -> Array:
    (m, k), n = x.shape, (len(starts) - 1) // pieces_of(x.shape[1])
    y = np.empty((m, n), x.dtype)
    call(x, starts, columns, values, bias, _room(PANEL * k, x.dtype), y, m, n, k, len(starts), len(columns))
    return y


def _values(w: Array, starts: Array, columns: Array) -> Array:
    made: Array = w.reshape(-1, HEIGHT, w.shape[1])[rows_of(starts, w.shape[1]), :, columns]
    return made


@host("sparse", "block_values", "X:nk L:s I:b X!:b16 in ik is ib", answers=True)
def _values_host(call: CFunction, w: Array, starts: Array, columns: Array) -> Array:
    values = np.empty((len(columns), HEIGHT), w.dtype)
    call(w, starts, columns, values, *w.shape, len(starts), len(columns))
    return values


def _input_gradient(g: Array, starts: Array, columns: Array, values: Array, k: int) -> Array:
    made: Array = array_module(g).matmul(g, dense_of(starts, columns, values, k))
    return made


@host("sparse", "block_input_gradient", "X:mn L:s I:b X:b16 X!:80k X!:mk im in ik is ib", answers=True)
def _input_gradient_host(call: CFunction, g: Array, starts: Array, columns: Array, values: Array, k: int) -> Array:
    by_x = np.empty((len(g), k), g.dtype)
    call(g, starts, columns, values, _room((PANEL + 16) * k, g.dtype), by_x, *g.shape, k, len(starts), len(columns))
    return by_x


def _weight_gradient(g: Array, x: Array, starts: Array, columns: Array, out: Array) -> Array:
    whole = array_module(g).matmul(g.T, x)
    values = _values(whole, starts, columns)
    out[...] = dense_of(starts, columns, values, x.shape[1])
    return out


@host("sparse", "block_weight_gradient", "X:mn X:mk L:s I:b X!:128k+32b X!:nk im in ik is ib", answers=True)
def _weight_gradient_host(call: CFunction, g: Array, x: Array, starts: Array, columns: Array, out: Array) -> Array:
    (m, n), k = g.shape, x.shape[1]
    work = _room(MOST_ROWS * k + 2 * HEIGHT * len(columns), x.dtype)
    call(g, x, starts, columns, work, out, m, n, k, len(starts), len(columns))
    return out


def _room(count: int, dtype: np.dtype) -> Array:
    return _scratch.room(count * dtype.itemsize)[:count * dtype.itemsize].view(dtype)


_scratch = Scratch()                             # rows turned, and sums

block_product = Kernel("block_product", _product, host=_blocks_host, numba=_blocks_host.loop("sparse"))
"""x w' + bias from (x, starts, columns, values (B, 16), bias or None)."""

csr_product = Kernel("csr_product", _product, host=_csr_host, numba=_csr_host.loop("sparse"))
"""x w' + bias from (x, starts, columns, values (C,), bias or None)."""

block_values = Kernel("block_values", _values, host=_values_host, numba=_values_host.loop("sparse"))
"""values (B, 16) from (w (N, K), starts, columns)."""

block_input_gradient = Kernel("block_input_gradient", _input_gradient, host=_input_gradient_host,
                              numba=_input_gradient_host.loop("sparse"))
"""g w from (g (M, N), starts, columns, values (B, 16), K)."""

block_weight_gradient = Kernel("block_weight_gradient", _weight_gradient, host=_weight_gradient_host,
                               numba=_weight_gradient_host.loop("sparse"))
"""`out` (N, K), written: g' x in the blocks, zero elsewhere, from (g (M, N), x (M, K), starts, columns, out)."""
