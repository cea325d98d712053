"""A dataset of (input, target) rows spread over HDF5 shards, read without the HDF5 library."""

from __future__ import annotations

import resource
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.columns import PREFIX, Columns, Shapes, inputs_of, labels_of, rows_of
from mpitrain.data.storage import READERS, File, Reader
from mpitrain.errors import DataError, StorageError

Rows = NDArray[np.int64]
Values = NDArray[Any]


class Field:
    """One of a dataset's columns, x or one input by name, or y: `shape` and `dtype` of a row, and a reader per shard."""

    def __init__(self, label: str, shards: list[dict[str, Any]], starts: Rows):
        first = shards[0][label]
        self.label, self.name, self.starts = label, first["name"], starts
        self.stored = np.dtype(first["dtype"])
        self.dtype = self.stored.newbyteorder("=")
        self.shape: tuple[int, ...] = tuple(first["shape"][1:])
        self.row_bytes = int(np.prod(self.shape, dtype=np.int64)) * self.stored.itemsize

    def read(self, rows: Rows, of_labels: Mapping[str, list[Reader]]) -> Values:
        readers = of_labels[self.label]
        out = np.empty((len(rows), self.row_bytes), np.uint8)
        if len(readers) == 1:
            readers[0].gather(rows, out)
        else:
            shard = np.searchsorted(self.starts, rows, side="right") - 1
            for s in np.unique(shard):
                places = np.flatnonzero(shard == s)
                part = np.empty((len(places), self.row_bytes), np.uint8)
                readers[s].gather(rows[places] - self.starts[s], part)
                out[places] = part
        values: Values = out.view(self.stored).reshape(len(rows), *self.shape)
        return values if self.stored.isnative else values.astype(self.dtype)


class Fields:
    """The inputs by name of a dataset, each a `Field`, read as `Columns`."""

    label = "x"

    def __init__(self, shards: list[dict[str, Any]], starts: Rows):
        self.fields = {label[len(PREFIX):]: Field(label, shards, starts) for label in inputs_of(shards[0])}
        self.name = {name: field.name for name, field in self.fields.items()}
        self.shape = Shapes({name: field.shape for name, field in self.fields.items()})
        self.dtype = ", ".join(f"{name} {field.dtype}" for name, field in self.fields.items())
        self.row_bytes = sum(field.row_bytes for field in self.fields.values())

    def read(self, rows: Rows, of_labels: Mapping[str, list[Reader]]) -> Columns:
        return Columns({name: field.read(rows, of_labels) for name, field in self.fields.items()})


class Dataset:
    """The rows of all shards one after the other; `read` may be called from many threads.

    `kind` is "classification", "regression" or "tokens" (then `y` is None: see `tokens.TokenWindows`). Files are opened
    on first use and must stay as they were examined (DataError E_DATA_CHANGED); checksums are checked once per block,
    when it is first read (DataError E_DATA_CHECKSUM).
    """

    def __init__(self, description: dict[str, Any]):
        self.description, self.kind, self.path = description, description["kind"], description["path"]
        self.vocabulary: list[str] | None = description["vocabulary"]
        self.classes: list[str] | None = description["classes"]
        self.categories: dict[str, Any] = description.get("categories") or {}
        self.shards: list[dict[str, Any]] = description["shards"]
        counts = [rows_of(shard) for shard in self.shards]
        self.starts: Rows = np.cumsum([0, *counts[:-1]], dtype=np.int64)
        self.n: int = sum(counts)
        self.labels = labels_of(self.shards[0])
        self.x: Any = Field("x", self.shards, self.starts) if "x" in self.labels else Fields(self.shards, self.starts)
        self.y = Field("y", self.shards, self.starts) if "y" in self.labels else None
        targets: Any = self.y or self.x
        self.names: tuple[Any, str] = (self.x.name, targets.name)
        self._files: list[File] = []
        self._readers: dict[str, list[Reader]] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return self.n

    def open(self) -> None:
        """Open and map every file; the first read does it too."""
        with self._lock:
            if self._readers:
                return
            _allow_open_files(len(self.shards) + 64)
            try:
                for shard in self.shards:
                    self._files.append(File(shard, self.description["host"]))
                self._readers = {label: [READERS[shard[label]["storage"]](file, shard[label])
                                         for shard, file in zip(self.shards, self._files)]
                                 for label in self.labels}
            except BaseException:
                self.close()
                raise

    def read(self, rows: Rows) -> tuple[Any, Values]:
        """(x, y) of the given rows in the given order, as fresh arrays in the dtype of the file and native byte order; x as
        `Columns` where the inputs have names."""
        if self.y is None:
            raise DataError(f'"{self.x.name}" has no targets; it is read as windows of tokens', file=self.path)
        return self.read_field(self.x, rows), self.read_field(self.y, rows)

    def read_field(self, field: Any, rows: Rows) -> Any:
        """The values of one of `x` and `y`."""
        if not self._readers:
            self.open()
        if len(rows) and (rows.min() < 0 or rows.max() >= self.n):
            wrong = int(rows.min() if rows.min() < 0 else rows.max())
            raise DataError(f"row {wrong} of a dataset of {self.n} rows", file=self.path)
        return field.read(rows, self._readers)

    def where(self, row: int) -> tuple[str, int]:
        """(file, row inside that file) of a row, for messages."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return str(self.shards[shard]["file"]), row - int(self.starts[shard])

    def verify(self) -> int:
        """Check every checksum there is and decode every chunk; the number of checksums that were compared."""
        self.open()
        return sum(reader.verify() for readers in self._readers.values() for reader in readers)

    def close(self) -> None:
        with self._lock:
            self._readers = {}
            for file in self._files:
                file.close()
            self._files = []


def _allow_open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise StorageError(f"{wanted} files must be open at once, but the limit is {hard}; raise it (ulimit -Hn) or import into "
                           f"larger shards")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
