"""Products x (M, K) w' + bias by a sparse matrix w (N, K), in two forms, and how a matrix is brought into them.

    blocks   16 rows and a column each: `starts` (N / 16 + 1), `columns` (B,), `values` (B, 16); the blocks of rows 16 g to
             16 g + 15 are starts[g] : starts[g + 1]
    CSR      compressed sparse rows: `starts` (N + 1), `columns` (C,), `values` (C,)

A row of the result has the same bits whatever batch it is part of. IndexError where starts or columns point outside of what there
is. `benchmarks/sparse.py` compares both with our products by a dense matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, Scratch, host

HEIGHT, PANEL = 16, 64                           # native/sparse.c's


class Sparse(NamedTuple):
    """A sparse matrix (N, K) in one of the forms."""

    starts: Array
    columns: Array
    values: Array

    @property
    def nbytes(self) -> int:
        return int(self.starts.nbytes + self.columns.nbytes + self.values.nbytes)


def to_blocks(w: Array) -> Sparse:
    """The blocks of w (N, K) that have a number other than 0; 16 divides N."""
    tall = w.reshape(-1, HEIGHT, w.shape[1])
    live = (tall != 0).any(axis=1)
    groups, columns = np.nonzero(live)
    return Sparse(np.concatenate([[0], np.cumsum(live.sum(axis=1))]).astype(np.int64), columns.astype(np.int32),
                  np.ascontiguousarray(tall[groups, :, columns]))


def to_csr(w: Array) -> Sparse:
    """The numbers of w (N, K) other than 0, row by row."""
    rows, columns = np.nonzero(w)
    return Sparse(np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(w)))]).astype(np.int64),
                  columns.astype(np.int32), np.ascontiguousarray(w[rows, columns]))


def dense_of(starts: Array, columns: Array, values: Array, k: int) -> Array:
    """The matrix of either form, of k columns."""
    xp = array_module(values)
    rows = xp.repeat(xp.arange(len(starts) - 1), xp.diff(starts).tolist())
    tall = xp.zeros((len(starts) - 1, values[0:1].size if values.ndim > 1 else 1, k), values.dtype)
    tall[rows, :, columns] = values.reshape(len(columns), -1)
    return tall.reshape(-1, k)


def _product(x: Array, starts: Array, columns: Array, values: Array, bias: Array | None) -> Array:
    y = array_module(x).matmul(x, dense_of(starts, columns, values, x.shape[1]).T)
    if bias is not None:
        y += bias
    return y


@host("sparse", "block_product", "X:mk L:n/16+1 I:b X:b16 X?:n X!:mn im in ik ib", answers=True)
def _blocks_host(call: CFunction, x: Array, starts: Array, columns: Array, values: Array, bias: Array | None) -> Array:
    (m, k), n = x.shape, HEIGHT * (len(starts) - 1)
    y = np.empty((m, n), x.dtype)
    call(x, starts, columns, values, bias, y, m, n, k, len(columns))
    return y


@host("sparse", "csr_product", "X:mk L:n+1 I:c X:c X?:n X!:64k X!:mn im in ik ic", answers=True)
def _csr_host(call: CFunction, x: Array, starts: Array, columns: Array, values: Array, bias: Array | None) -> Array:
    (m, k), n = x.shape, len(starts) - 1
    y = np.empty((m, n), x.dtype)
    turned = _scratch.room(PANEL * k * x.itemsize)[:PANEL * k * x.itemsize].view(x.dtype)
    call(x, starts, columns, values, bias, turned, y, m, n, k, len(columns))
    return y


_scratch = Scratch()                             # columns of x, side by side

block_product = Kernel("block_product", _product, host=_blocks_host, numba=_blocks_host.loop("sparse"))
"""x w' + bias from (x, starts, columns, values (B, 16), bias or None)."""

csr_product = Kernel("csr_product", _product, host=_csr_host, numba=_csr_host.loop("sparse"))
"""x w' + bias from (x, starts, columns, values (C,), bias or None)."""
