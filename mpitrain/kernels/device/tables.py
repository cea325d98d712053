"""Rows of a table on a device; see kernels/rows.py."""

from __future__ import annotations

from math import prod

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, computed, contiguous, over
from mpitrain.kernels.device.rows import AT_A_TIME, by_rows

SOURCE = Source("tables")
THREADS, KEYS_A_BLOCK, DIGITS, SCANNING, CHUNK = 256, 1024, 256, 1024, 128          # tables.cu's
MOST = 1 << 31                                                         # positions and entries are sorted as int32

_take_rows = SOURCE.function("take_rows", "X:ve L:n X!:ne in ie iv")
_keys_of_indices = SOURCE.function("keys_of_indices", "L:n I!:n I!:n in i")
_count_digits = SOURCE.function("count_digits", "I:n I!:256b in ib i")
_scan_counts = SOURCE.function("scan_counts", "I!:n in")
_place_digits = SOURCE.function("place_digits", "I:n I:n I!:n I!:n I:256b in ib i")
_sum_runs = SOURCE.function("sum_runs", "X:ne I:n I:n S!:ve S!:re in ie iv ir")
_sum_chunks = SOURCE.function("sum_chunks", "I:n X!:ve X:re in ie iv ir")


@device("take_rows")
def take_rows(table: Array, indices: Array) -> Array:
    table, flat = contiguous(table), contiguous(indices, "int64").reshape(-1)
    entries, width = len(table), prod(table.shape[1:])
    result = array_module(table).empty((*indices.shape, *table.shape[1:]), table.dtype)
    if result.size:
        _take_rows(*by_rows(flat.size, result.nbytes), table, flat, result, flat.size, width, entries)
    return result


def sorted_indices(indices: Array, entries: int) -> tuple[Array, Array]:
    """(keys, order), int32: the indices (N,) int64 from the least on, `entries` for those out of range, and where each stood,
    equal ones in order. (CuPy's sort waits for the device, and cannot be part of a graph.)
    """
    xp, n = array_module(indices), indices.size
    keys, order, keys_out, order_out = (xp.empty(n, "int32") for _ in range(4))
    _keys_of_indices(over(n, THREADS, MOST), THREADS, indices, keys, order, n, entries)
    blocks = -(-n // KEYS_A_BLOCK)
    counts = xp.empty((DIGITS, blocks), "int32")
    for shift in range(0, entries.bit_length(), 8):
        _count_digits((blocks,), THREADS, keys, counts, n, blocks, shift)
        _scan_counts((1,), SCANNING, counts, counts.size)
        _place_digits((blocks,), THREADS, keys, order, keys_out, order_out, counts, n, blocks, shift)
        keys, order, keys_out, order_out = keys_out, order_out, keys, order
    return keys, order


@device("scatter_add_rows")
def scatter_add_rows(out: Array, indices: Array, values: Array) -> Array:
    xp, (entries, width), n = array_module(out), out.shape, indices.size
    assert values.shape == (n, width) and n < MOST and entries < MOST
    assert out.dtype.name in (values.dtype.name, computed(values.dtype))
    if not n * width:
        return out
    sums = contiguous(out, computed(values.dtype))                    # a copy of 16 bits: sums are rounded once
    indices, values = contiguous(indices, "int64"), contiguous(values)
    keys, order = sorted_indices(indices, entries)
    windows = -(-n // CHUNK)
    partial = xp.empty((2 * windows, width), sums.dtype)
    _, threads = by_rows(1, AT_A_TIME * width * values.itemsize)               # a thread has one vector of a row
    _sum_runs((n + windows,), threads, values, keys, order, sums, partial, n, width, entries, len(partial))
    _sum_chunks((windows,), threads, keys, sums, partial, n, width, entries, len(partial))
    if sums is not out:
        out[...] = sums
    return out
