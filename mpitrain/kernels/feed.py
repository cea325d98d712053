"""Rows as they are stored -> what a model is given: numbers looked up in a table, images moved.

A table has what the host makes of each number that a dtype has, so rows that are looked up have the host's bits.
"""

from __future__ import annotations

from mpitrain.backend.namespace import Array, array_module
from mpitrain.kernels.kernel import Kernel


def _stored_rows(out: Array, values: Array, table: Array | None, moves: Array | None) -> Array:
    xp = array_module(out)
    if table is not None:
        bits = values.view(f"u{values.dtype.itemsize}").astype("int64")
        channels = xp.arange(values.shape[1]) if len(table) > 1 else xp.zeros(values.shape[1], "int64")
        values = table[channels.reshape(-1, 1, 1), bits]
    if moves is not None:
        (n, c, h, w), down, aside = values.shape, moves[:, :1].astype("int64"), moves[:, 1:].astype("int64")
        rows, columns = xp.arange(h) + down, xp.where(aside % 2 == 1, w - 1 - xp.arange(w), xp.arange(w)) + (aside >> 1)
        inside = ((rows >= 0) & (rows < h))[:, None, :, None] & ((columns >= 0) & (columns < w))[:, None, None, :]
        samples, channels = xp.arange(n).reshape(-1, 1, 1, 1), xp.arange(c).reshape(1, -1, 1, 1)
        values = values[samples, channels, rows.clip(0, h - 1)[:, None, :, None], columns.clip(0, w - 1)[:, None, None, :]]
        values = xp.where(inside, values, xp.zeros((), values.dtype))
    out[...] = values
    return out


stored_rows = Kernel("stored_rows", _stored_rows)
"""Writes rows into `out` (N, C, H, W), and returns it.

`values` has that shape: of integers of 1 or 2 bytes, of which each becomes ``table[channel, value as an unsigned number]``, with
`table` (C or 1, 2^bits) of out's dtype; or of the format that numbers of `out` are computed in, without a table. `moves` (N, 2)
int16, or None: out[n, :, i, j] is the pixel in row i + moves[n, 0] and column j + (moves[n, 1] >> 1), where moves[n, 1] is odd
that in column W - 1 - j + (moves[n, 1] >> 1), and 0 where there is none.
"""
