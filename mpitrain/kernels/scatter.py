"""Adding rows where an index says: the gradient of a table look-up."""

from __future__ import annotations

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host


def _reference(out: Array, indices: Array, values: Array) -> Array:
    array_module(out).add.at(out, indices, values)
    return out


@host("rows", "scatter_add_rows", "pppii")
def _host(call: CFunction, out: Array, indices: Array, values: Array) -> Array:
    assert values.shape == (indices.size, out.shape[1]) and values.dtype == out.dtype
    if not out.flags.c_contiguous:
        return _reference(out, indices, values)
    call(out, np.ascontiguousarray(indices, dtype=np.int64), np.ascontiguousarray(values), *values.shape)
    return out


scatter_add_rows = Kernel("scatter_add_rows", _reference, host=_host)
"""Adds row i of `values` (N, D) to row indices[i] of `out` (V, D), in place and in order of i; returns `out`."""
