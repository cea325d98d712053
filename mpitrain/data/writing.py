"""Writing a folder of HDF5 shards with its manifest, so that it is there complete or not at all.

The HDF5 library lays a shard's metadata out in memory only (a full disk can crash it, or make it publish a damaged
file); the values go to disk by plain writes that report their errors. The folder is built under a temporary name next
to its place and renamed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.manifest import BLOCK, FORMAT, KINDS, MANIFEST, VERSION
from mpitrain.errors import AccessError, DataError, OutputError, StorageError

OURS = re.compile(r"manifest\.json|shard-\d{5,}\.h5")
SHARD_BYTES = 256 << 20          # A shard of x is small enough to copy, and a thousand shards hold 256 GiB.


class Rows(Protocol):
    """What is written: an array, or anything that makes rows when sliced (images decoded as they are needed)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, rows: slice, /) -> Any: ...


def write_shards(folder: Path | str, x: Rows, y: Rows | None = None, *, kind: str, classes: Sequence[str] | None = None,
                 vocabulary: Sequence[str] | None = None, shard_rows: int | None = None, compression: str | None = None,
                 overwrite: bool = False) -> Path:
    """Write `x` (and `y`) as ``shard-00000.h5``, ... and ``manifest.json`` in `folder`; returns the folder.

    Datasets are called x and y, readable by every HDF5 since 1.8, contiguous and uncompressed (the fast way to train), or
    with `compression="gzip"` in chunks of about 1 MiB. An existing folder raises OutputError unless it is empty, or
    `overwrite` is set and it holds nothing but shards we wrote. Full disks and the like raise StorageError.
    """
    folder = Path(folder)
    _check_values(x, y, kind, folder)
    n = x.shape[0]
    row_bytes = int(np.prod(x.shape[1:], dtype=np.int64)) * x.dtype.itemsize
    shard_rows = shard_rows or max(1, SHARD_BYTES // max(1, row_bytes))
    manifest: dict[str, Any] = {"format": FORMAT, "version": VERSION, "kind": kind, "x": "/x", "y": None if y is None else "/y",
                                "block": BLOCK, "classes": None if classes is None else list(classes),
                                "vocabulary": None if vocabulary is None else list(vocabulary), "shards": []}
    with new_folder(folder, overwrite) as building:
        for i, start in enumerate(range(0, n, shard_rows)):
            part = slice(start, min(n, start + shard_rows))
            values = {"x": np.ascontiguousarray(x[part])} | ({} if y is None else {"y": np.ascontiguousarray(y[part])})
            manifest["shards"].append(write_shard(building / f"shard-{i:05d}.h5", values, kind, compression))
        write_file(building / MANIFEST, [(0, json.dumps(manifest, indent=1).encode())])
    return folder


def write_classification(out: Path, x: NDArray[Any], y: NDArray[Any], source: Path, overwrite: bool,
                         classes: list[str] | None = None) -> Path:
    """Rows with class labels from 0 up, in the smallest unsigned type; unnamed classes are called by their numbers."""
    if len(x) != len(y):
        raise DataError(f"{len(x)} inputs but {len(y)} labels", file=source)
    if len(y) and y.min() < 0:
        row = int(np.flatnonzero(y < 0)[0])
        raise DataError(f"label {y[row]} is negative; classes are numbered from 0", file=source, row=row)
    classes = classes or [str(i) for i in range(int(y.max()) + 1 if len(y) else 0)]
    return write_shards(out, x, y.astype(np.min_scalar_type(len(classes))), kind="classification", classes=classes,
                        overwrite=overwrite)


def _check_values(x: Rows, y: Rows | None, kind: str, folder: Path) -> None:
    assert kind in KINDS, kind
    if x.shape[0] == 0:
        raise DataError("there are no rows to write", file=folder)
    if y is not None and y.shape[0] != x.shape[0]:
        raise DataError(f"{x.shape[0]} rows of x but {y.shape[0]} of y; each input needs one target", file=folder)
    for name, values in (("x", x), ("y", y)):
        if values is not None and (values.dtype.kind not in "biuf" or values.dtype.itemsize > 8):
            raise DataError(f"{name} has dtype {values.dtype}; only integers and floats of at most 8 bytes can be trained on",
                            file=folder, dataset=name)


@contextlib.contextmanager
def new_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and vanishes when it does not."""
    refuse_existing(folder, overwrite)
    building = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        building.mkdir(mode=0o777)
    try:
        yield building
        with storage_errors(folder):
            _sync_folder(building)
            old = folder.with_name(f".{folder.name}.old-{secrets.token_hex(4)}") if folder.exists() else None
            if old is not None:
                folder.rename(old)
            building.rename(folder)
            _sync_folder(folder.parent)
            if old is not None:
                remove_shards(old)
    except BaseException:
        for file in building.glob("*"):
            file.unlink()
        with contextlib.suppress(FileNotFoundError):       # The folder is gone where the rename went through.
            building.rmdir()
        raise


def refuse_existing(folder: Path, overwrite: bool) -> None:
    """OutputError unless `folder` may be written; an importer asks before a long read too."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise OutputError("the output is not a folder; choose another --out", file=folder)
    names = {f.name for f in folder.iterdir()}
    if not names:
        return
    if not overwrite:
        raise OutputError("the output folder exists; choose another --out, or --overwrite to replace the shards in it",
                          file=folder)
    foreign = sorted(n for n in names if MANIFEST not in names or not OURS.fullmatch(n))
    if foreign:
        raise OutputError(f"the output folder holds files that are not our shards ({', '.join(foreign[:3])}); "
                          f"they are not deleted: choose another --out", file=folder)


def remove_shards(folder: Path) -> None:
    """Delete a folder of shards, and nothing that we did not write."""
    for file in folder.iterdir():
        if OURS.fullmatch(file.name):
            file.unlink()
    folder.rmdir()


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """What the operating system refuses, as our errors."""
    try:
        yield
    except PermissionError as error:
        raise AccessError(f"no permission to write here ({error.strerror})", file=error.filename or path) from error
    except OSError as error:
        raise StorageError(f"writing failed: {error.strerror or error}", file=error.filename or path) from error


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_shard(path: Path, values: dict[str, NDArray[Any]], kind: str, compression: str | None) -> dict[str, Any]:
    """Write one shard; its entry for the manifest."""
    entry: dict[str, Any] = {"file": path.name}
    with storage_errors(path), memory_file(values, kind, compression) as (image, places):
        size = os.fstat(image).st_size
        pieces: list[tuple[int, Any]] = []
        for name, array in values.items():
            entry[name] = {"dtype": array.dtype.str, "shape": list(array.shape)}
            if isinstance(places[name], int):
                raw = array.reshape(-1).view(np.uint8).data
                blocks: list[Any] = [raw[i:i + BLOCK] for i in range(0, len(raw), BLOCK)]
                pieces.append((places[name], raw))
            else:
                blocks = [os.pread(image, length, offset) for offset, length in places[name]]
            entry[name]["sha256"] = [hashlib.sha256(block).hexdigest() for block in blocks]
        place = 0
        for offset, raw in [*sorted(pieces, key=lambda p: p[0]), (size, b"")]:      # HDF5's own bytes lie around the values.
            if offset > place:
                pieces.append((place, os.pread(image, offset - place, place)))
            place = offset + len(raw)
        write_file(path, pieces)
    entry["size"] = size
    return entry


@contextlib.contextmanager
def memory_file(values: dict[str, NDArray[Any]], kind: str, compression: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """An HDF5 file in anonymous memory, and where each dataset's values belong in it.

    Contiguous values are not in it: their space is reserved and never touched, so it costs no memory (an offset
    says where they go). Compressed chunks are in it ([(offset, size), ...] in C order).
    """
    import h5py
    with os.fdopen(os.memfd_create("mpitrain-shard"), "w+b") as memory:
        places: dict[str, Any] = {}
        with h5py.File(memory, "w", libver="earliest") as file:
            file.attrs["schema"] = np.bytes_(f"{FORMAT} {VERSION}")
            file.attrs["kind"] = np.bytes_(kind)
            for name, array in values.items():
                if compression:
                    chunk = (_chunk_rows(array), *array.shape[1:])
                    data = file.create_dataset(name, data=array, chunks=chunk, compression=compression, shuffle=True)
                    found: list[Any] = []
                    data.id.chunk_iter(found.append)
                    places[name] = [(c.byte_offset, c.size) for c in sorted(found, key=lambda c: c.chunk_offset)]
                    continue
                plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
                plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
                plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
                data = h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(array.dtype),
                                       h5py.h5s.create_simple(array.shape), plist)
                places[name] = data.get_offset()
        memory.flush()
        yield memory.fileno(), places


def _chunk_rows(array: NDArray[Any]) -> int:
    return min(len(array), max(1, BLOCK // max(1, array[:1].nbytes)))


def write_file(path: Path, pieces: Sequence[tuple[int, Any]]) -> None:
    """Write (offset, bytes) pieces to a new file and sync it. The space is reserved first: a full disk shows at once."""
    with storage_errors(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            size = max(offset + len(data) for offset, data in pieces)
            os.posix_fallocate(fd, 0, size)
            for offset, data in pieces:
                view = memoryview(data)
                while len(view):
                    written = os.pwrite(fd, view[:1 << 30], offset)
                    view, offset = view[written:], offset + written
            os.fsync(fd)
        finally:
            os.close(fd)
