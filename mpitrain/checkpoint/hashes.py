"""SHA-256 of named arrays: two runs that agree in every bit agree in one line of run.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

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
    return line(name, array.dtype.name, array.shape, array_sha256(array))


def line(name: str, dtype: str, shape: Iterable[int], sha256: str) -> str:
    assert "\t" not in name and "\n" not in name, f"{name!r} would read as two fields"
    return f"{name}\t{dtype}\t{'x'.join(map(str, shape))}\t{sha256}\n"


def total_sha256(lines: Iterable[str]) -> str:
    """SHA-256 of the arrays' lines in UTF-8, sorted by name bytes: any program can recompute it from a checkpoint."""
    total = hashlib.sha256()
    for line in sorted(lines, key=lambda line: line.partition("\t")[0].encode()):
        total.update(line.encode())
    return total.hexdigest()


def stored_hashes(arrays: Mapping[str, Any]) -> dict[str, str]:
    """``parameters_sha256`` and ``buffers_sha256``, as `State.hashes` gives them, of the arrays of a manifest; without reading
    them, from the SHA-256 of their pieces. A hash is left out where an array of its kind has several pieces, or there is none."""
    found = {}
    for kind in ("parameters", "buffers"):
        stored = {name.removeprefix(f"{kind}/"): about for name, about in arrays.items() if name.startswith(f"{kind}/")}
        if stored and all(len(about["pieces"]) == 1 for about in stored.values()):
            found[f"{kind}_sha256"] = total_sha256(line(name, about["dtype"], about["shape"], about["pieces"][0]["sha256"])
                                                   for name, about in stored.items())
    return found
