"""What every importer needs: reading the source, refusing an existing output early, writing classes."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.writing import write_shards
from mpitrain.errors import AccessError, DataError, MissingError, OutputError, StorageError, text_of

Values = NDArray[Any]


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked where its name ends in .gz."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except FileNotFoundError:
        raise MissingError("the file to import is not there", file=path) from None
    except PermissionError:
        raise AccessError("no permission to read the file to import", file=path) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"is not a complete gzip file: {text_of(error)}", file=path) from None
    except OSError as error:
        raise StorageError(f"reading the file to import failed: {error.strerror}", file=path) from error


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Before a long read, not after it (`write_shards` looks again)."""
    if out.exists() and not overwrite and (not out.is_dir() or any(out.iterdir())):
        raise OutputError("the output folder exists; choose another --out, or --overwrite to replace the shards in it", file=out)


def smallest_unsigned(largest: int) -> type[np.unsignedinteger[Any]]:
    return np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.uint32


def write_classification(out: Path, x: Values, y: Values, source: Path, overwrite: bool,
                         classes: list[str] | None = None) -> Path:
    """Rows with class labels from 0 up, in the smallest unsigned type; unnamed classes are called by their numbers."""
    if len(x) != len(y):
        raise DataError(f"{len(x)} inputs but {len(y)} labels", file=source)
    if len(y) and y.min() < 0:
        row = int(np.flatnonzero(y < 0)[0])
        raise DataError(f"label {y[row]} is negative; classes are numbered from 0", file=source, row=row)
    classes = classes or [str(i) for i in range(int(y.max()) + 1 if len(y) else 0)]
    return write_shards(out, x, y.astype(smallest_unsigned(len(classes))), kind="classification", classes=classes,
                        overwrite=overwrite)
