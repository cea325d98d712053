"""The formats of predictions, by the ending of the output's name: each makes a file from the part file, and gives its path.

The part file is HDF5 already; NPZ and CSV are made of it piece by piece, so memory is no bound.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_BYTES = 8 << 20

Made = Callable[[Path, int, tuple[int, ...], Any], Path]


def as_hdf5(part: Path, start: int, shape: tuple[int, ...], dtype: Any) -> Path:
    return part


def as_npz(part: Path, start: int, shape: tuple[int, ...], dtype: Any) -> Path:
    """An uncompressed archive with one array, "predictions", the same bytes each time."""
    made = part.with_name(part.name + ".npz")
    entry = zipfile.ZipInfo("predictions.npy", (1980, 1, 1, 0, 0, 0))
    with _or_nothing(made), open(made, "wb") as file:
        with zipfile.ZipFile(file, "w") as archive, archive.open(entry, "w", force_zip64=True) as out:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(out, header)
            for block in _blocks(part, start, shape, dtype):
                out.write(np.ascontiguousarray(block).data.cast("B"))
        _sync(file)
    return made


def as_csv(part: Path, start: int, shape: tuple[int, ...], dtype: Any) -> Path:
    """A line for each row, below a header line that numbers the values; each reads back to the same bits."""
    made = part.with_name(part.name + ".csv")
    with _or_nothing(made), open(made, "w", encoding="ascii", newline="") as file:
        file.write(",".join(_columns(shape[1:])) + "\r\n")
        for block in _blocks(part, start, shape, dtype):
            for row in block.reshape(len(block), -1):
                file.write(",".join(map(str, row)) + "\r\n")
        _sync(file)
    return made


@contextmanager
def _or_nothing(made: Path) -> Iterator[None]:
    """Half a file is removed: it would keep a disk full that was too small for it, and the part file has it all."""
    try:
        yield
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def _columns(shape: Sequence[int]) -> Iterator[str]:
    """``predictions``, or for rows of several values ``predictions_0``, or ``predictions_0_1`` for those of two dims."""
    for place in np.ndindex(*shape):
        yield "_".join(["predictions", *map(str, place)])


def _blocks(part: Path, start: int, shape: tuple[int, ...], dtype: Any) -> Iterator[Any]:
    """Some rows at a time, as the part file has them."""
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
    step = max(1, BLOCK_BYTES // row_bytes)
    with open(part, "rb") as file:
        file.seek(start)
        for first in range(0, shape[0], step):
            n = min(step, shape[0] - first)
            yield np.frombuffer(file.read(n * row_bytes), dtype.newbyteorder("<")).reshape(n, *shape[1:])


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


FORMATS: dict[str, Made] = {".h5": as_hdf5, ".hdf5": as_hdf5, ".npz": as_npz, ".csv": as_csv}
