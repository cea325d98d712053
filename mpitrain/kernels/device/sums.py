"""Sums over the rows of a matrix on a device; see kernels/sums.py."""

from __future__ import annotations

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, along_rows, computed

SOURCE, WIDE, ROWS, ACROSS = Source("sums"), 256, 64, 32              # columns.h's WIDE and ROWS_A_BLOCK, and sums.cu's ACROSS
MOST_Y = 65535                                                        # of a grid's second size
_row_partials = SOURCE.function("row_partials", "X~:rn S!:bn ir in ib")
_sum_partials = SOURCE.function("sum_partials", "X!:n S:rn ir in")


def sum_partials(partial: Array, out: Array) -> None:
    """Writes the sums over the rows of `partial` (P, N), of the format that out's is computed in, into `out` (N,)."""
    made = out if out.flags.c_contiguous else array_module(out).empty(out.shape, out.dtype)
    _sum_partials((-(-made.size // ACROSS),), WIDE, made, partial, *partial.shape)
    if made is not out:
        out[...] = made


@device("column_sums")
def column_sums(x: Array, out: Array) -> Array:
    x = along_rows(x)
    rows, columns = x.shape
    blocks = -(-rows // ROWS)
    partial = array_module(x).empty((blocks, columns), computed(x.dtype))
    _row_partials((-(-columns // WIDE), min(blocks, MOST_Y)), WIDE, x, partial, rows, columns, blocks)
    sum_partials(partial, out)
    return out
