"""Rows of NPY and NPZ files: mapped where they lie in the file as they are, as a stream where they are compressed.

An array in Fortran's order is read whole, since its rows lie nowhere together.
"""

from __future__ import annotations

import io
import lzma
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mpitrain.data.importers import load_numpy
from mpitrain.data.shards import Rows, Values
from mpitrain.data.storage import Bytes, File
from mpitrain.errors import DataError, text_of

SKIPPED = 1 << 20                 # bytes at a time
BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, NotImplementedError, RuntimeError, ValueError)
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def describe_numpy(path: Path, x: str | None) -> tuple[str, dict[str, Any]]:
    """The name of the array, and where its values are: `x` of an NPZ file, by default "x" or the only one; or that of an NPY
    file."""
    try:
        with open(path, "rb") as file:
            found = _in_zip(file, x) if zipfile.is_zipfile(file) else _in_npy(file) if x is None else None
    except BROKEN:
        found = None
    if found is None:                                     # what is wrong, if anything, is found by reading it all
        name, values = read_numpy(path, x)
        return name, {"shape": list(values.shape), "dtype": values.dtype.str, "storage": "table", "asked": x}
    return found


def _in_npy(file: BinaryIO) -> tuple[str, dict[str, Any]] | None:
    file.seek(0)
    entry = _header(file)
    if entry is None or entry["offset"] + _n_bytes(entry) > os.fstat(file.fileno()).st_size:
        return None
    return "x", {**entry, "storage": "contiguous"}


def _in_zip(file: BinaryIO, x: str | None) -> tuple[str, dict[str, Any]] | None:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        arrays = [name.removesuffix(".npy") for name in names]
        name = x or ("x" if "x" in arrays or len(arrays) != 1 else arrays[0])
        if f"{name}.npy" not in names:
            return None
        member = archive.getinfo(f"{name}.npy")
        with archive.open(member) as inside:
            entry = _header(inside)
        if entry is None or entry["offset"] + _n_bytes(entry) != member.file_size:
            return None
        if member.compress_type != zipfile.ZIP_STORED:
            return name, {**entry, "storage": "stream", "member": member.filename}
    file.seek(member.header_offset)
    local = file.read(30)
    start = member.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    if start + member.file_size > os.fstat(file.fileno()).st_size:
        return None
    return name, {**entry, "storage": "contiguous", "offset": start + entry["offset"]}


def _header(file: Any) -> dict[str, Any] | None:
    """shape, dtype and offset of an array; None where rows do not lie one after the other, or it is of a rare kind."""
    read = HEADERS.get(np.lib.format.read_magic(file))
    if read is None:
        return None
    shape, fortran, dtype = read(file)
    if not shape or fortran and len(shape) > 1 or dtype.hasobject or 0 in shape:
        return None
    return {"shape": list(shape), "dtype": dtype.str, "offset": file.tell()}


def _n_bytes(entry: dict[str, Any]) -> int:
    total: int = np.dtype(entry["dtype"]).itemsize
    for size in entry["shape"]:
        total *= size
    return total


def read_numpy(path: Path, x: str | None) -> tuple[str, Values]:
    """The whole array."""
    loaded = load_numpy(path, "the data file is not there", "no permission to read the data")
    if not isinstance(loaded, dict):
        if x is not None:
            raise DataError(f'an NPY file has one array, without a name, and --x asks for "{x}"; leave out --x', file=path)
        loaded, x = {"x": loaded}, "x"
    name = x or ("x" if "x" in loaded or len(loaded) != 1 else next(iter(loaded)))
    if name not in loaded:
        raise DataError(f'no array "{name}" (there: {", ".join(sorted(loaded)) or "none"}); name one with --x', file=path,
                        dataset=name)
    return name, loaded[name]


class WholeReader:
    """The rows of one file in memory."""

    def __init__(self, file: File, description: dict[str, Any]):
        file.check()
        values = np.ascontiguousarray(read_numpy(file.path, description["asked"])[1])
        self.rows: Bytes = values.reshape(len(values), -1).view(np.uint8)

    def gather(self, rows: Rows, out: Bytes) -> None:
        np.take(self.rows, rows, axis=0, out=out, mode="clip")

    def verify(self) -> int:
        return 0


class _Places(io.RawIOBase):
    """An open file with a place of its own, for those who seek."""

    def __init__(self, file: File):
        self._file = file
        self._at: int = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        before: int = (0, self._at, self._file.size)[whence]
        self._at = before + offset
        return self._at

    def readinto(self, into: Any) -> int:
        found: bytes = os.pread(self._file.fd, len(into), self._at)
        into[:len(found)] = found
        self._at += len(found)
        return len(found)


class StreamReader:
    """Rows of a compressed array, in the order in which they are asked for: an earlier one begins the stream again."""

    def __init__(self, file: File, description: dict[str, Any]):
        self.file, self.description = file, description
        self.row_bytes = _n_bytes(description) // description["shape"][0]
        self._stream: Any = None

    def gather(self, rows: Rows, out: Bytes) -> None:
        self.file.check()
        try:
            for place in np.argsort(rows, kind="stable"):
                out[place] = np.frombuffer(self._row(int(rows[place])), np.uint8)
        except BROKEN as error:
            raise DataError(f"the array is damaged: {text_of(error)}; copy the file again from its source",
                            code="E_DATA_CHECKSUM", file=self.file.path, dataset=self.description["name"]) from None

    def _row(self, row: int) -> bytes:
        start = self.description["offset"] + row * self.row_bytes
        if self._stream is None or self._stream.tell() > start:
            archive = zipfile.ZipFile(_Places(self.file))  # noqa: SIM115
            self._stream = archive.open(self.description["member"])
        while self._stream.tell() < start:
            if not self._stream.read(min(SKIPPED, start - self._stream.tell())):
                raise EOFError("it ends too early")
        data: bytes = self._stream.read(self.row_bytes)
        if len(data) != self.row_bytes:
            raise EOFError("it ends too early")
        return data

    def verify(self) -> int:
        return 0
