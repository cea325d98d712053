"""Rows of NPZ, NPY and CSV files.

`TABLES` has for each ending of a name what describes such a file: the name of what is read, and an entry for its reader, with
"shape" (rows, ...), "dtype" and "storage".
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.columns import Asked, labelled
from mpitrain.data.csv_file import CsvReader, describe_csv
from mpitrain.data.numpy_file import StreamReader, WholeReader, describe_numpy
from mpitrain.data.storage import READERS, reading
from mpitrain.errors import DataError

Describe = Callable[[Path, str | None], tuple[str, dict[str, Any]]]
TABLES: dict[str, Describe] = {".npz": describe_numpy, ".npy": describe_numpy, ".csv": describe_csv}
READERS |= {"table": WholeReader, "stream": StreamReader, "csv": CsvReader}


def has_array(path: Path, name: str) -> bool:
    """Whether a file is NPZ and has an array of that name; what is wrong with one that is no NPZ is found where it is read."""
    try:
        with zipfile.ZipFile(path) as file:
            return f"{name}.npy" in file.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def describe_table(path: Path, x: Asked | None, describe: Describe) -> dict[str, Any]:
    """The entry of a description for such a file. DataError where it has no rows of numbers."""
    datasets = {"x": x} if x is None or isinstance(x, str) else labelled(x)
    found = {label: _values(path, name, describe) for label, name in datasets.items()}
    with reading(path, "the data file is not there", "no permission to read the data", "reading the data failed"):
        status = path.stat()
    return {"file": str(path.absolute()), "size": status.st_size, "mtime_ns": status.st_mtime_ns, **found, "y": None}


def _values(path: Path, x: str | None, describe: Describe) -> dict[str, Any]:
    """The entry of one of its arrays, or some of its columns."""
    name, found = describe(path, x)
    shape, dtype = tuple(found["shape"]), np.dtype(found["dtype"])
    if not shape or 0 in shape:
        raise DataError(f"there are no rows: the shape is {shape}; expected rows along the first dim", file=path,
                        dataset=name)
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise DataError(f"the values are {dtype}; expected integers or floats of at most 8 bytes", file=path, dataset=name)
    return {"name": name, **found}
