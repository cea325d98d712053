"""Products of a layer whose bits in a row depend on that row alone, at every number of rows: what text is generated with."""

from __future__ import annotations

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host
from mpitrain.kernels.product import KINDS, LEAST_COLUMNS, LEAST_ROWS, native, work_bytes


def row_by_row(x: Array, weight: Array, bias: Array | None) -> Array:
    """x (M, K) times weight (N, K) turned, plus bias (N,): the sums are those of `kernels.product`, of any size.

    From 8 rows on a row is packed with others, where C is; below, the weights are read once for all rows.
    """
    x, weight = array_module(x).ascontiguousarray(x), array_module(x).ascontiguousarray(weight)
    if len(x) >= LEAST_ROWS and len(weight) >= LEAST_COLUMNS and x.dtype in KINDS and work_bytes():
        return native(x, weight.T, bias, None)
    return few_rows(x, weight, bias)


def _few_rows(x: Array, weight: Array, bias: Array | None) -> Array:
    xp = array_module(x)
    made = xp.empty((len(x), len(weight)), x.dtype)
    for row, y in zip(x, made):
        (weight * row).sum(axis=1, out=y)
    if bias is not None:
        made += bias
    return made


@host("product", "few_rows", "X:mk X:nk X?:n X!:mn im in ik")
def _few_rows_host(call: CFunction, x: Array, weight: Array, bias: Array | None) -> Array:
    (m, k), n = x.shape, len(weight)
    y = np.empty((m, n), x.dtype)
    call(x, weight, None if bias is None else np.ascontiguousarray(bias, x.dtype), y, m, n, k)
    return y


few_rows = Kernel("few_rows", _few_rows, _few_rows_host, _few_rows_host.loop("few_rows"))
"""x (M, K) weight' + bias (N,) or None, from (x, weight (N, K), bias): no array has gaps."""
