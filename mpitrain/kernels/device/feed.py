"""Stored rows on a device; see kernels/feed.py."""

from __future__ import annotations

from mpitrain.backend.namespace import Array
from mpitrain.kernels.device import device
from mpitrain.kernels.device.code import Source, computed, contiguous

SOURCE, WIDE = Source("feed"), 256                                    # feed.cu's
KEPT = 12 << 10                      # bytes of tables that a block keeps by itself; eight such blocks fit a multiprocessor
BLOCKS = 1 << 11                     # at most: some for each multiprocessor, of which each reads the tables
_LOOKED = "H?:2n in ic ih iw it i"
_rows_of_bytes = SOURCE.function("rows_of_bytes", f"X!:nchw B:nchw X:256t {_LOOKED}")
_rows_of_shorts = SOURCE.function("rows_of_shorts", f"X!:nchw H:nchw X:65536t {_LOOKED}")
_rows_of_numbers = SOURCE.function("rows_of_numbers", "X!:nchw S:nchw H?:2n in ic ih iw")


@device("stored_rows")
def stored_rows(out: Array, values: Array, table: Array | None, moves: Array | None) -> Array:
    assert out.shape == values.shape and out.flags.c_contiguous
    n, c, h, w = out.shape
    if not out.size:
        return out
    tables = 1 if table is None else len(table)
    assert tables in (1, c) and c * h * w < 1 << 31
    if moves is None:                    # The pixels of a channel are alike then, and where all have one table, so are channels.
        c, h, w = (1, 1, c * h * w) if tables == 1 else (c, 1, h * w)
    grid, threads = _sizes(n, c * h * w // (8 if w % 8 == 0 else 1))
    if table is None:
        _rows_of_numbers(grid, threads, out, contiguous(values, computed(out.dtype)), contiguous(moves), n, c, h, w)
        return out
    table = contiguous(table, out.dtype)
    kept = table.nbytes if table.nbytes <= KEPT else 0
    run = _rows_of_bytes if values.dtype.itemsize == 1 else _rows_of_shorts
    run(grid, threads, out, contiguous(values), table, contiguous(moves), n, c, h, w, tables, kept, shared=kept)
    return out


def _sizes(samples: int, count: int) -> tuple[tuple[int, int], int]:
    """The grid, and threads of a block, for `count` threads of each sample: as few as possible have nothing to do."""
    blocks = -(-count // WIDE)
    threads = 32 * -(-count // (32 * blocks))
    blocks = min(blocks, BLOCKS)
    return (blocks, max(1, min(samples, BLOCKS // blocks))), threads
