"""The file of predictions, written by many ranks: each row once, in its place, and whole or not there at all.

    OUT.part     a contiguous HDF5 file whose headers rank 0 has laid out; each rank writes its rows at their places
    OUT.chunks   what is predicted, by its SHA-256, and for each chunk of rows "1" when they are on the disk, for each of the
                 ranks that share rows along cp
    OUT          the part file, renamed, or NPZ or CSV made from it by rank 0

A job that is killed leaves the first two, from which another one, on any number of ranks, goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.predictions import DATASET
from mpitrain.errors import AccessError, MpitrainError, OutputError, StorageError
from mpitrain.files.disk import FILE_MODE, file_sha256, reserve, said, sync_folder, write_fully
from mpitrain.files.hdf5_file import lay_out_rows, little_endian
from mpitrain.infer.formats import FORMATS

SYNC_S = 2.0                              # a killed job repeats what it has written in so many seconds, and not much more


@dataclass(frozen=True)
class Rows:
    """What the file holds: `shape` (rows, ...), cut into chunks of `size` rows; `identity` is a hash of all that decides
    them."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    size: int
    identity: str
    attributes: Mapping[str, str]
    sharing: int = 1                      # ranks that have parts of each row

    @property
    def n_chunks(self) -> int:
        return -(-self.shape[0] // self.size)

    @property
    def part(self) -> Path:
        return self.path.with_name(self.path.name + ".part")

    @property
    def chunks(self) -> Path:
        return self.path.with_name(self.path.name + ".chunks")


def refuse(path: Path, inputs: Sequence[str], *, resume: bool, overwrite: bool) -> None:
    """OutputError unless `path` may be written; rank 0 asks before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise OutputError(f"the name of the output says its format: let it end in {', '.join(FORMATS)}", file=path)
    if not path.parent.is_dir():
        raise OutputError(f"there is no folder {path.parent}; make it, or choose another --out", file=path)
    part, _ = found = path.with_name(path.name + ".part"), path.with_name(path.name + ".chunks")
    for one in (path, *found):
        if one.is_symlink() or one.exists() and not one.is_file():
            raise OutputError("something that is no plain file stands there; choose another --out", file=one)
        if one.exists() and any(os.path.samefile(one, file) for file in inputs):
            raise OutputError("the output is the input itself; choose another --out", file=path)
    if path.exists() and not overwrite:
        raise OutputError("the output is there already; choose another --out, or --overwrite to replace it", file=path)
    if part.exists() and not (resume or overwrite):
        raise OutputError("a prediction was interrupted there; --resume goes on with it, --overwrite begins again", file=part)


def begin(rows: Rows, *, resume: bool) -> list[Any]:
    """Makes the files, or takes what is there; rank 0 calls it. Where the values begin, and which chunks are done, as "0110"."""
    around, start, size = lay_out_rows(DATASET, rows.shape, np.dtype(rows.dtype), rows.attributes)
    goes_on = resume and rows.part.exists() and rows.chunks.exists()
    done = _done_before(rows, size) if goes_on else "0" * rows.n_chunks
    try:
        if not goes_on:
            _write_new(rows.part, around, size)
        marks = "".join(mark * rows.sharing for mark in done)
        _write_new(rows.chunks, [(0, f"{rows.identity}\n{marks}".encode())], 0)
        sync_folder(rows.path.parent, write_error)
    except MpitrainError:
        for path in () if goes_on else (rows.part, rows.chunks):
            path.unlink(missing_ok=True)
        raise
    return [start, done]


def _done_before(rows: Rows, size: int) -> str:
    identity, _, marks = rows.chunks.read_text(errors="replace").partition("\n")
    sharing = len(marks) // rows.n_chunks
    fits = sharing * rows.n_chunks == len(marks) > 0 and not set(marks) - {"0", "1"}
    if identity != rows.identity or not fits or rows.part.stat().st_size != size:
        raise OutputError("what was interrupted there is another prediction: other rows, another checkpoint or other options; "
                          "--overwrite begins again", file=rows.part)
    return "".join("1" if "0" not in marks[i:i + sharing] else "0" for i in range(0, len(marks), sharing))


def _write_new(path: Path, pieces: Sequence[tuple[int, bytes]], size: int) -> None:
    doing = "making the file"
    try:
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            doing = "reserving space"
            reserve(fd, size)
            doing = "writing"
            for place, piece in pieces:
                write_fully(fd, memoryview(piece), place)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise write_error(error, doing, path) from error


def write_error(error: OSError, doing: str, path: Path, **_: Any) -> MpitrainError:
    """What the operating system refuses, as our error."""
    kind = AccessError if isinstance(error, PermissionError) else StorageError
    return kind(f"{doing} failed: {said(error)}; free some space, or choose another --out", file=path)


class Writer:
    """A rank's writes into the part file that rank 0 has made."""

    def __init__(self, rows: Rows, start: int, sharer: int, clock: Callable[[], float] = time.monotonic):
        self.rows, self.start, self.sharer, self.clock = rows, start, sharer, clock
        self.row_bytes = int(np.prod(rows.shape[1:], dtype=np.int64)) * np.dtype(rows.dtype).itemsize
        self._new: list[int] = []                               # chunks that may not be on the disk yet
        self._synced = clock()
        try:
            self.fd, self.marks = (os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC) for path in (rows.part, rows.chunks))
        except OSError as error:
            raise write_error(error, "opening the file that rank 0 has made", rows.part) from error

    def write(self, first: int, values: Any, pieces: Sequence[tuple[int, int]] = ()) -> None:
        """Rows from `first` on. `pieces`: where the values' second dim lies in the file's, as (start, length) in turn."""
        if values.dtype != np.dtype(self.rows.dtype) or not pieces and values.shape[1:] != self.rows.shape[1:]:
            raise OutputError(f"a row of the output is {values.dtype} {values.shape[1:]}, and was {self.rows.dtype} "
                              f"{self.rows.shape[1:]} for the first sample; the model's outputs have to be of one shape",
                              file=self.rows.path)
        try:
            if not pieces:
                write_fully(self.fd, little_endian(values), self.start + first * self.row_bytes)
                return
            step = self.row_bytes // self.rows.shape[1]
            for row, value in enumerate(values, first):
                done = 0
                for place, length in pieces:
                    where = self.start + row * self.row_bytes + place * step
                    write_fully(self.fd, little_endian(value[done:done + length]), where)
                    done += length
        except OSError as error:
            raise write_error(error, "writing", self.rows.part) from error

    def mark(self, chunk: int) -> None:
        """This rank's part of a chunk is written."""
        self._new.append(chunk)
        if self.clock() - self._synced > SYNC_S:
            self.sync()

    def sync(self) -> None:
        """What is written is on the disk, and then known to be."""
        try:
            os.fdatasync(self.fd)
            begins = len(self.rows.identity) + 1
            for chunk in self._new:
                write_fully(self.marks, memoryview(b"1"), begins + chunk * self.rows.sharing + self.sharer)
        except OSError as error:
            raise write_error(error, "syncing to the disk", self.rows.part) from error
        self._new, self._synced = [], self.clock()

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.marks)


def finish(rows: Rows, start: int) -> str:
    """Gives the whole file its name, in its format; rank 0 calls it. The SHA-256 of the output."""
    doing = "writing the output"
    try:
        made = FORMATS[rows.path.suffix.lower()](rows.part, start, rows.shape, np.dtype(rows.dtype))
        sha256 = file_sha256(made)
        doing = "renaming the part file"
        made.replace(rows.path)
        sync_folder(rows.path.parent, write_error)
        for path in (rows.part, rows.chunks):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(error, doing, rows.path) from error
    return sha256
