"""SHA-256 of named arrays: two runs that agree in every bit agree in one line of run.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from mpitrain.files.hdf5_file import little_endian


def array_sha256(array: np.ndarray) -> str:
    """SHA-256 of the values alone: neither shape nor dtype enters."""
    return hashlib.sha256(little_endian(array)).hexdigest()


def array_line(name: str, array: np.ndarray) -> str:
    """One array's line ``name<TAB>dtype<TAB>shape<TAB>sha256 of the bytes<NEWLINE>``.

    The shape is written ``3x4`` (nothing for a scalar), the dtype as NumPy calls it (``float32``). Memory layout and byte order
    of the machine do not matter.
    """
    assert "\t" not in name and "\n" not in name, f"{name!r} would read as two fields"
    shape = "x".join(str(length) for length in array.shape)
    return f"{name}\t{array.dtype.name}\t{shape}\t{array_sha256(array)}\n"


def total_sha256(lines: Iterable[str]) -> str:
    """SHA-256 of the arrays' lines in UTF-8, sorted by name bytes: any program can recompute it from a checkpoint."""
    total = hashlib.sha256()
    for line in sorted(lines, key=lambda line: line.partition("\t")[0].encode()):
        total.update(line.encode())
    return total.hexdigest()
