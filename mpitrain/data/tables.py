"""Rows of NPZ, NPY and CSV files, read whole by each rank: for data that fit into memory, which such files are made for.

`TABLES` has a reader for each ending of a name; it gives the name of what it has read, and the values (rows, ...).
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.importers import decoded, load_numpy
from mpitrain.data.shards import Rows, Values
from mpitrain.data.storage import READERS, Bytes, File, reading
from mpitrain.errors import DataError

GONE, DENIED = "the data file is not there", "no permission to read the data"
Read = Callable[[Path, str | None], tuple[str, Values]]
TABLES: dict[str, Read] = {}


def of_names(*suffixes: str) -> Callable[[Read], Read]:
    def add(read: Read) -> Read:
        TABLES.update(dict.fromkeys(suffixes, read))
        return read
    return add


@of_names(".npz", ".npy")
def read_numpy(path: Path, x: str | None) -> tuple[str, Values]:
    """The array `x` of an NPZ file, by default "x" or the only one; or the array of an NPY file."""
    loaded = load_numpy(path, GONE, DENIED)
    if not isinstance(loaded, dict):
        if x is not None:
            raise DataError(f'an NPY file has one array, without a name, and --x asks for "{x}"; leave out --x', file=path)
        loaded, x = {"x": loaded}, "x"
    name = x or ("x" if "x" in loaded or len(loaded) != 1 else next(iter(loaded)))
    if name not in loaded:
        raise DataError(f'no array "{name}" (there: {", ".join(sorted(loaded)) or "none"}); name one with --x', file=path,
                        dataset=name)
    return name, loaded[name]


@of_names(".csv")
def read_csv(path: Path, x: str | None) -> tuple[str, Values]:
    """A table of numbers, with a header line or without, as float32 (rows, columns); `x` names columns in their order, by the
    header or, without one, by their numbers from 0. A number may be nan or inf."""
    with reading(path, GONE, DENIED, "reading the data failed"):
        text = path.read_bytes()
    lines = [line for line in csv.reader(decoded(text, path).splitlines()) if line]
    if not lines:
        raise DataError("the table is empty", file=path)
    header = not all(map(is_number, lines[0]))
    names = [cell.strip() for cell in lines[0]] if header else [str(i) for i in range(len(lines[0]))]
    wanted = names if x is None else [name.strip() for name in x.split(",")]
    for name in wanted:
        if name not in names:
            raise DataError(f'no column "{name}" (there: {", ".join(names[:20])}); name columns with --x, commas between',
                            file=path, dataset=name)
    columns, body = [names.index(name) for name in wanted], lines[1:] if header else lines
    values = np.empty((len(body), len(columns)), np.float32)
    for row, cells in enumerate(body):
        if len(cells) != len(names):
            raise DataError(f"{len(cells)} columns, but the first line has {len(names)}", file=path, row=row)
        for place, column in enumerate(columns):
            if not is_number(cells[column]):
                raise DataError(f'"{cells[column]}" in column "{names[column]}" is no number', file=path, row=row)
            values[row, place] = float(cells[column])
    return "x" if x is None else x, values


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def has_array(path: Path, name: str) -> bool:
    """Whether a file is NPZ and has an array of that name; what is wrong with one that is no NPZ is found where it is read."""
    try:
        with zipfile.ZipFile(path) as file:
            return f"{name}.npy" in file.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def describe_table(path: Path, x: str | None, read: Read) -> dict[str, Any]:
    """The entry of a description for such a file. DataError where it has no rows of numbers."""
    name, values = read(path, x)
    if values.ndim == 0 or 0 in values.shape:
        raise DataError(f"there are no rows: the shape is {values.shape}; expected rows along the first dim", file=path,
                        dataset=name)
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise DataError(f"the values are {values.dtype}; expected integers or floats of at most 8 bytes", file=path, dataset=name)
    with reading(path, GONE, DENIED, "reading the data failed"):
        status = path.stat()
    found = {"name": name, "asked": x, "shape": list(values.shape), "dtype": values.dtype.str, "storage": "table"}
    return {"file": str(path.absolute()), "size": status.st_size, "mtime_ns": status.st_mtime_ns, "x": found, "y": None}


class TableReader:
    """The rows of one file in memory."""

    def __init__(self, file: File, description: dict[str, Any]):
        file.check()
        values = np.ascontiguousarray(TABLES[file.path.suffix.lower()](file.path, description["asked"])[1])
        self.rows: Bytes = values.reshape(len(values), -1).view(np.uint8)

    def gather(self, rows: Rows, out: Bytes) -> None:
        np.take(self.rows, rows, axis=0, out=out, mode="clip")

    def verify(self) -> int:
        return 0


READERS["table"] = TableReader
