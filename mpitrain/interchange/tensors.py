"""Named tensors in a file: what every reader gives, and the way a file is made of bytes."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.errors import AccessError, DataError, MissingError, NumericsError, OutputError, StorageError
from mpitrain.files.disk import said, storage_error, sync_folder, write_file

Array = np.ndarray[Any, Any]
BFLOAT16 = "bfloat16"
MOST_DIMS = 32                                    # NumPy of before 2.0


@dataclass(frozen=True)
class Stored:
    """A tensor where it lies, in a mapped file: nothing is read before somebody looks at `values`.

    `bits` is a view of the file; bfloat16, which NumPy has not, is there as uint16, and `dtype` has its name.
    """

    bits: Array
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.bits.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype == BFLOAT16 or self.bits.dtype.kind == "f"

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def values(self, part: Any = ...) -> Array:
        """The numbers of a slice, all by default, still in the file; of bfloat16 a float32 copy, which has the same values."""
        bits: Array = self.bits[part]
        if self.dtype != BFLOAT16:
            return bits
        wide = np.asarray(bits.astype(np.uint32))
        wide <<= 16
        return wide.view(np.float32)


def stored(tensor: Array | Stored) -> Stored:
    """An array as tensors of files are."""
    return tensor if isinstance(tensor, Stored) else Stored(tensor, tensor.dtype.name)


def rounded(name: str, array: Array, dtype: str) -> Stored:
    """Numbers in float16 or bfloat16, each the nearest, ties to even. NumericsError for finite ones beyond its range."""
    with np.errstate(over="ignore"):
        wide = np.asarray(array, np.float32)
        if dtype == BFLOAT16:
            bits = wide.view(np.uint32).astype(np.uint64)
            half = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
            half[np.isnan(wide)] = 0x7FC0
            found = Stored(half, dtype)
        else:
            found = Stored(array.astype(dtype), dtype)
    if np.isinf(found.values()).sum() > np.isinf(array).sum():
        raise NumericsError(f'"{name}" has numbers beyond the range of {dtype}; export it without --dtype, or take another one')
    return found


@dataclass(frozen=True)
class TensorFile:
    """The tensors of a file by name, in its order, and what else it says: words (safetensors) or plain values (.pt)."""

    path: Path
    tensors: Mapping[str, Stored]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def fits(shape: Sequence[int], itemsize: int) -> bool:
    """Whether NumPy has arrays of this shape, also without a number: it multiplies the sizes that are not 0."""
    return len(shape) <= MOST_DIMS and math.prod(max(n, 1) for n in shape) * itemsize < 1 << 63


def mapped(path: Path) -> Array:
    """The bytes of a file, mapped: pages come from the disk as they are looked at. MissingError, AccessError, DataError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)          # NONBLOCK: a FIFO would wait
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise DataError("expected a file of tensors, found what is no regular file", file=path)
            if not status.st_size:
                raise DataError("expected a file of tensors, found an empty file", file=path)
            return np.frombuffer(mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ), np.uint8)
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError("there is no such file", file=path) from None
    except PermissionError:
        raise AccessError("the file cannot be read: permission denied", file=path) from None
    except OSError as error:
        raise StorageError(f"reading failed: {said(error)}", file=path) from error


def shown(value: Any) -> str:
    """A value from somebody's file as a part of one printable line."""
    text = f'"{value}"' if isinstance(value, str) else str(value)
    text = ascii(text)[1:-1]
    return text if len(text) <= 80 else f"{text[:77]}..."


def publish(path: Path, chunks: Sequence[bytes | memoryview], *, overwrite: bool = False) -> None:
    """Makes the file `path` of these bytes: it is whole or not there. OutputError where it is there, unless `overwrite`."""
    refuse_existing(path, overwrite=overwrite)
    work = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        write_file(work, chunks, _output_error)
        os.replace(work, path)
    except OSError as error:
        raise _output_error(error, "writing", path) from error
    finally:
        with contextlib.suppress(OSError):       # of a name that is too long, or a folder that is gone
            work.unlink()
    sync_folder(path.parent, _output_error)


_output_error = partial(storage_error, elsewhere="write to")


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """OutputError where no file can be made of this name, or there is one that is not to be overwritten."""
    try:
        is_folder, has_folder = path.is_dir(), path.parent.is_dir()
    except OSError as error:                      # a name that is too long
        raise _output_error(error, "making the file", path) from error
    if is_folder:
        raise OutputError("expected the name of a file to write, found a folder", file=path)
    if not has_folder:
        raise OutputError(f"there is no folder {path.parent}; make it, or write to another place", file=path)
    if os.path.lexists(path) and not overwrite:
        raise OutputError("the file is there already; --overwrite replaces it, or give another name", file=path)
