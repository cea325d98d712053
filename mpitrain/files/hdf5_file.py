"""Writing an HDF5 file without trusting libhdf5 with the disk.

On a full disk libhdf5 can close a file without an error and leave zeros in it, and end the process with SIGSEGV later
(h5py issues 914 and 1120). So libhdf5 only lays the file out: it writes headers to a sparse file in memory and says
where each array's bytes belong. The bytes, ours and its, go to the disk by plain calls whose errors we see:

    layout in memory -> reserve the space -> pwrite -> fsync -> read again and compare -> (the caller) rename, fsync folder

The result is an ordinary file for the oldest readers (superblock 0, contiguous datasets), the same bytes each time.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mpitrain.errors import StorageError
from mpitrain.files.disk import BLOCK, DTYPES, read_fully, reading, write_file


def write_hdf5(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[int, str, dict[str, tuple[int, str]]]:
    """Make the new file `path` with a contiguous dataset per array (names with "/" make groups), synced and verified.

    The result is the file's size and SHA-256, and by name the offset of each array and its SHA-256. The raw data is never copied
    as a whole. Raises StorageError, AccessError or OutputError with the file and offset.
    """
    chunks, offsets = lay_out(arrays)
    write_file(path, chunks)
    sha256 = _read_again(path, chunks)
    places = {name: (offsets[name], hashlib.sha256(little_endian(array)).hexdigest()) for name, array in arrays.items()}
    return sum(map(len, chunks)), sha256, places


def little_endian(array: np.ndarray) -> memoryview:
    """The values as C-order little-endian bytes; a view where the array is so already."""
    ordered = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return ordered.reshape(-1).view(np.uint8).data


def lay_out(arrays: Mapping[str, np.ndarray], attributes: Mapping[str, str] = MappingProxyType({})
            ) -> tuple[list[bytes | memoryview], dict[str, int]]:
    """The bytes of the file, in order, with these attributes, and the offset of each array's (0 for an empty one)."""
    raw = {name: little_endian(array) for name, array in arrays.items()}
    offsets, headers = _places(arrays, attributes)
    chunks: list[bytes | memoryview] = []
    position = 0
    for offset, name in sorted((offset, name) for name, offset in offsets.items() if len(raw[name])):
        chunks += [headers.read_at(position, offset - position), raw[name]]
        position = offset + len(raw[name])
    return [*chunks, headers.read_at(position, headers.size - position)], offsets


def lay_out_rows(name: str, shape: Sequence[int], dtype: Any, attributes: Mapping[str, str]
                 ) -> tuple[list[tuple[int, bytes]], int, int]:
    """A file with one dataset whose values come later: (place, bytes) of what stands around them, where they begin, and the
    file's size."""
    values = np.broadcast_to(np.zeros((), dtype), tuple(shape))
    offsets, headers = _places({name: values}, attributes)
    start = offsets[name]
    end = start + values.size * values.itemsize
    return [(0, headers.read_at(0, start)), (end, headers.read_at(end, headers.size - end))], start, headers.size


def _read_again(path: Path, chunks: Sequence[bytes | memoryview]) -> str:
    """SHA-256 of the file, read again after writing: it must hold these chunks and nothing else."""
    digest, block, position = hashlib.sha256(), memoryview(bytearray(BLOCK)), 0
    with reading(path) as fd:
        for chunk in chunks:
            for start in range(0, len(chunk), BLOCK):
                wanted = memoryview(chunk)[start:start + BLOCK]
                found = block[:len(wanted)]
                read_fully(fd, found, position, path)
                if not np.array_equal(np.frombuffer(found, np.uint8), np.frombuffer(wanted, np.uint8)):
                    raise StorageError("what was read again after writing is not what was written: check the disk or set "
                                       "run.out to another file system", file=path, offset=position)
                digest.update(found)
                position += len(found)
        if os.fstat(fd).st_size != position:
            raise StorageError(f"the file has {os.fstat(fd).st_size} bytes after {position} were written: does another program "
                               f"write to it?", file=path)
    return digest.hexdigest()


class _SparseFile(io.RawIOBase):
    """A file in memory that keeps only the pages that were written; libhdf5 writes its headers to it.

    libhdf5 reads headers back when its metadata cache runs over, so reading must work too.
    """
    PAGE = 4096

    def __init__(self) -> None:
        self.pages: dict[int, bytearray] = {}
        self.position = self.size = 0

    def _pieces(self, start: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """(page, first byte in the page, first byte in the range, length) of each page that the range touches."""
        done = 0
        while done < length:
            page, first = divmod(start + done, self.PAGE)
            n = min(self.PAGE - first, length - done)
            yield page, first, done, n
            done += n

    def read_at(self, start: int, length: int) -> bytes:
        """`length` bytes from `start`; zeros where nothing was written."""
        out = bytearray(length)
        for page, first, done, n in self._pieces(start, length):
            if page in self.pages:
                out[done:done + n] = self.pages[page][first:first + n]
        return bytes(out)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + (0, self.position, self.size)[whence]
        return self.position

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        for page, first, done, n in self._pieces(self.position, len(data)):
            self.pages.setdefault(page, bytearray(self.PAGE))[first:first + n] = data[done:done + n]
        self.position += len(data)
        self.size = max(self.size, self.position)
        return len(data)

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        out[:] = self.read_at(self.position, len(out))
        self.position += len(out)
        return len(out)

    def truncate(self, size: int | None = None) -> int:
        self.size = self.position if size is None else size
        return self.size


def _places(arrays: Mapping[str, np.ndarray], attributes: Mapping[str, str]) -> tuple[dict[str, int], _SparseFile]:
    """Let libhdf5 lay out the file: the offset of each array's bytes (0 for an empty one), and the headers."""
    import h5py  # 0.15 s; ranks that write nothing never pay it

    headers = _SparseFile()
    offsets = {}
    with h5py.File(headers, "w", libver="earliest") as file:
        how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        how.set_layout(h5py.h5d.CONTIGUOUS)
        how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)   # places are given at once, ...
        how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)     # ... and nothing is written there
        how.set_obj_track_times(False)                  # the same arrays give the same file
        for name, text in attributes.items():
            file.attrs[name] = np.bytes_(text)
        for name, array in arrays.items():
            assert array.dtype.name in DTYPES, f"{name}: dtype {array.dtype} has no place in such a file"
            group, _, leaf = name.rpartition("/")
            kind = h5py.h5t.py_create(array.dtype.newbyteorder("<"), logical=True)
            space = h5py.h5s.create_simple(array.shape) if array.ndim else h5py.h5s.create(h5py.h5s.SCALAR)
            parent = file.require_group(group) if group else file
            dataset = h5py.h5d.create(parent.id, leaf.encode(), kind, space, how)
            offsets[name] = dataset.get_offset() or 0
    return offsets, headers
