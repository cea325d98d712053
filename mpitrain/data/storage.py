"""The values of one described dataset, read from the bytes of its file: by mmap, or chunk by chunk.

A reader hands out rows as raw bytes, an array (rows, bytes of a row) of uint8: gathering bytes never converts, so an
unaligned or big-endian file costs nothing extra, and NumPy never makes a hidden copy of a whole mapped file.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import mmap
import os
import socket
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.content import sampled_sha256
from mpitrain.data.filters import DECODE
from mpitrain.errors import AccessError, DataError, MissingError, StorageError, text_of

Bytes = NDArray[np.uint8]
NO_PLACE = (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)          # What these say is no file, whatever the disk does.
CACHE_BYTES = 256 << 20          # Each dataset of a shard keeps so many bytes of decompressed chunks.


class Reader(Protocol):
    def gather(self, rows: NDArray[np.int64], out: Bytes) -> None: ...
    def verify(self) -> int: ...


@contextmanager
def reading(file: Path, missing: str, denied: str, failed: str) -> Iterator[None]:
    """What the operating system refuses, as our errors with these messages."""
    try:
        yield
    except FileNotFoundError:
        raise MissingError(missing, file=file) from None
    except PermissionError:
        raise AccessError(denied, file=file) from None
    except OSError as error:
        kind = MissingError if error.errno in NO_PLACE else StorageError
        raise kind(f"{failed}: {error.strerror}", file=file) from error


class File:
    """One open data file that notices when it is changed under us.

    A file that shrinks after it was mapped kills the process with SIGBUS at the next touch, so every read first asks the
    operating system whether the file is still the one that was opened. What stays unseen is a truncation in the
    microseconds between this look and the copy.
    """

    def __init__(self, shard: dict[str, Any], host: str):
        self.path = Path(shard["file"])
        with reading(self.path, "the data file is gone; this host may not see the folder that others see",
                     "no permission to read the data", "opening the data failed"):
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self.size: int = shard["size"]
        status = os.fstat(self.fd)
        self.changed_ns = status.st_mtime_ns
        self.links = status.st_nlink
        if status.st_size != self.size or host == socket.gethostname() and status.st_mtime_ns != shard["mtime_ns"]:
            self.close()       # Other hosts may hold copies with time stamps of their own.
            raise DataError(f"changed since it was examined: {shard['size']:,} bytes then, {status.st_size:,} now; start again",
                            code="E_DATA_CHANGED", file=self.path)
        if "sample" in shard:
            self._compare(shard["sample"], shard["sampled_among"])

    def _compare(self, sample: str, n_files: int) -> None:
        """This host may have a copy of its own, or other bytes under the same name."""
        with reading(self.path, "", "", "reading the data failed"):
            found = sampled_sha256(self.fd, self.size, n_files)
        if found != sample:
            self.close()
            raise DataError(f"holds other bytes here than where it was examined: sha256 {found[:8]}.. of blocks spread over it "
                            f"is not {sample[:8]}..; give all hosts the same file", code="E_DATA_CHANGED", file=self.path)

    def check(self) -> None:
        status = os.fstat(self.fd)
        if status.st_size != self.size or status.st_mtime_ns != self.changed_ns or status.st_nlink < self.links:
            what = (f"shrank from {self.size:,} to {status.st_size:,} bytes" if status.st_size < self.size
                    else "was deleted or replaced" if status.st_nlink < self.links else "was written to")
            raise DataError(f"{what} while training reads it; leave data files alone during a run, and resume it",
                            code="E_DATA_CHANGED", file=self.path,
                            offset=status.st_size if status.st_size < self.size else None)

    def read(self, offset: int, size: int, dataset: str) -> bytes:
        parts, place = [], offset
        while place < offset + size:
            try:
                part = os.pread(self.fd, offset + size - place, place)
            except OSError as error:
                raise StorageError(f"reading failed: {error.strerror}", file=self.path, dataset=dataset, offset=place) from error
            if not part:
                raise DataError(f"ends {offset + size - place:,} bytes too early", code="E_DATA_CHANGED", file=self.path,
                                dataset=dataset, offset=place)
            parts.append(part)
            place += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def check_sum(data: Any, expected: str, what: str, file: File, dataset: str, offset: int) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise DataError(f"{what}: sha256 {found[:8]}.. is not {expected[:8]}.. of the manifest; the file is damaged: copy it "
                        f"again from its source", code="E_DATA_CHECKSUM", file=file.path, dataset=dataset, offset=offset)


class ContiguousReader:
    """A dataset that lies in the file as one uncompressed piece, mapped; its blocks are verified when first touched."""

    def __init__(self, file: File, description: dict[str, Any]):
        self.file, self.name = file, description["name"]
        shape, itemsize = description["shape"], np.dtype(description["dtype"]).itemsize
        self.row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * itemsize
        self.n_bytes, self.offset = shape[0] * self.row_bytes, description["offset"]
        start = self.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        file.check()
        mapped = mmap.mmap(file.fd, self.offset + self.n_bytes - start, access=mmap.ACCESS_READ, offset=start)
        self.bytes: Bytes = np.frombuffer(mapped, np.uint8)[self.offset - start:]
        self.rows = self.bytes.reshape(shape[0], self.row_bytes)
        self.sums: list[str] = description.get("sha256", [])
        self.block: int = description.get("block", 1)
        self.waiting = np.ones(len(self.sums), bool)        # A block waits until somebody has verified it.
        self.n_waiting = len(self.sums)

    def gather(self, rows: NDArray[np.int64], out: Bytes) -> None:
        self.file.check()
        if self.n_waiting:
            self._verify_rows(rows)
        np.take(self.rows, rows, axis=0, out=out, mode="clip")        # The rows are in range; "raise" would buffer `out`.

    def _verify_rows(self, rows: NDArray[np.int64]) -> None:
        first, last = rows * self.row_bytes // self.block, ((rows + 1) * self.row_bytes - 1) // self.block
        touched = np.zeros(len(self.sums), bool)
        for step in range(int((last - first).max()) + 1):
            touched[np.minimum(first + step, last)] = True
        for block in np.flatnonzero(touched & self.waiting):
            self.verify_block(int(block))

    def verify_block(self, block: int) -> None:
        start = block * self.block
        check_sum(self.bytes[start:min(start + self.block, self.n_bytes)], self.sums[block], f'chunk {block} of "{self.name}"',
                  self.file, self.name, self.offset + start)
        self.waiting[block] = False                # Two threads may verify the same block; both come to this line.
        self.n_waiting = int(np.count_nonzero(self.waiting))

    def verify(self) -> int:
        for block in range(len(self.sums)):
            self.file.check()
            self.verify_block(block)
        return len(self.sums)


class ChunkedReader:
    """A chunked dataset, with or without gzip, shuffle and fletcher32: whole chunks are read, decoded and kept for a while.

    The unit of work is a band, the chunks that share their first index put together: whole rows.
    """

    def __init__(self, file: File, description: dict[str, Any]):
        self.file, self.description, self.name = file, description, description["name"]
        self.shape, self.chunk = tuple(description["shape"]), tuple(description["chunk"])
        self.itemsize = np.dtype(description["dtype"]).itemsize
        self.row_bytes = int(np.prod(self.shape[1:], dtype=np.int64)) * self.itemsize
        self.grid = tuple(-(-n // c) for n, c in zip(self.shape, self.chunk))
        self.chunks_per_band = int(np.prod(self.grid[1:], dtype=np.int64))
        self.sums: list[str] = description.get("sha256", [])
        self.bands: OrderedDict[int, Bytes] = OrderedDict()
        self.kept = 0
        self.lock = threading.Lock()

    def gather(self, rows: NDArray[np.int64], out: Bytes) -> None:
        self.file.check()
        wanted = rows // self.chunk[0]
        order = np.argsort(wanted, kind="stable")
        bands, starts = np.unique(wanted[order], return_index=True)
        for band, places in zip(bands, np.split(order, starts[1:])):
            out[places] = self._band(int(band))[rows[places] - band * self.chunk[0]]

    def _band(self, band: int) -> Bytes:
        with self.lock:
            if band in self.bands:
                self.bands.move_to_end(band)
                return self.bands[band]
        found = self._read_band(band)
        with self.lock:
            if band not in self.bands:
                self.bands[band] = found
                self.kept += found.nbytes
            while self.kept > CACHE_BYTES and len(self.bands) > 1:
                self.kept -= self.bands.popitem(last=False)[1].nbytes
        return found

    def _read_band(self, band: int) -> Bytes:
        if self.chunks_per_band == 1 and self.chunk[1:] == self.shape[1:]:
            return self._read_chunk(band).reshape(self.chunk[0], self.row_bytes)
        whole = np.empty((self.chunk[0], *self.shape[1:], self.itemsize), np.uint8)
        for i, place in enumerate(np.ndindex(self.grid[1:])):
            start = [p * c for p, c in zip(place, self.chunk[1:])]
            extent = [min(c, n - s) for c, n, s in zip(self.chunk[1:], self.shape[1:], start)]
            target = (slice(None), *(slice(s, s + e) for s, e in zip(start, extent)))
            source = (slice(None), *(slice(e) for e in extent))
            values = self._read_chunk(band * self.chunks_per_band + i).reshape(*self.chunk, self.itemsize)
            whole[target] = values[source]
        return whole.reshape(self.chunk[0], self.row_bytes)

    def _read_chunk(self, i: int) -> Bytes:
        offset, size = self.description["offsets"][i], self.description["sizes"][i]
        skipped = self.description["masks"][i] if self.description["masks"] else 0
        data = self.file.read(offset, size, self.name)
        if self.sums:
            check_sum(data, self.sums[i], f'chunk {i} of "{self.name}"', self.file, self.name, offset)
        full = int(np.prod(self.chunk, dtype=np.int64)) * self.itemsize
        try:
            for place, name in reversed(list(enumerate(self.description["filters"]))):
                if not skipped >> place & 1:
                    data = DECODE[name](data, full, self.itemsize)
            if len(data) != full:
                raise ValueError(f"{len(data):,} bytes where the chunk needs {full:,}")
        except (ValueError, zlib.error) as error:
            raise DataError(f'chunk {i} of "{self.name}" is damaged: {text_of(error)}', code="E_DATA_CHECKSUM",
                            file=self.file.path, dataset=self.name, offset=offset) from None
        return np.frombuffer(data, np.uint8)

    def verify(self) -> int:
        self.file.check()
        for i in range(len(self.description["offsets"])):
            self._read_chunk(i)
        return len(self.sums)


class InlineReader:
    """A dataset small enough that HDF5 keeps it in its header; the description carries the values."""

    def __init__(self, file: File, description: dict[str, Any]):
        data = base64.b64decode(description["data"])
        self.sums: list[str] = description.get("sha256", [])
        for i, expected in enumerate(self.sums):             # the header was read again by whoever examined the file
            start, name = i * description["block"], description["name"]
            check_sum(data[start:start + description["block"]], expected, f'block {i} of "{name}"', file, name, 0)
        self.rows = np.frombuffer(data, np.uint8).reshape(description["shape"][0], -1)

    def gather(self, rows: NDArray[np.int64], out: Bytes) -> None:
        np.take(self.rows, rows, axis=0, out=out, mode="clip")

    def verify(self) -> int:
        return len(self.sums)


READERS: dict[str, Callable[[File, dict[str, Any]], Reader]] = {
    "contiguous": ContiguousReader, "chunked": ChunkedReader, "inline": InlineReader}
