"""Writing a folder of HDF5 shards with its manifest, so that it is there complete or not at all.

The folder is built under a temporary name next to its place and renamed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.columns import PREFIX
from mpitrain.data.manifest import BLOCK, FORMAT, KINDS, MANIFEST, VERSION, version_of
from mpitrain.errors import AccessError, DataError, MpitrainError, OutputError, StorageError
from mpitrain.files.disk import sync_folder, write_file
from mpitrain.files.hdf5_file import lay_out, little_endian
from mpitrain.files.signed import signed_text

OURS = re.compile(r"manifest\.json|shard-\d{5,}\.h5")
SHARD_BYTES = 256 << 20          # A shard of x is small enough to copy, and a thousand shards hold 256 GiB.


class Rows(Protocol):
    """What is written: an array, or anything that makes rows when sliced (images decoded as they are needed)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, rows: slice, /) -> Any: ...


def write_shards(folder: Path | str, x: Rows | Mapping[str, Rows], y: Rows | None = None, *, kind: str,
                 classes: Sequence[str] | None = None,
                 vocabulary: Sequence[str] | None = None,
                 categories: Mapping[str, Sequence[str] | int] | None = None,
                 shard_rows: int | None = None, overwrite: bool = False) -> Path:
    """Write `x` (and `y`) as ``shard-00000.h5``, ... and ``manifest.json`` in `folder`; returns the folder.

    `x` may be several inputs by name. `categories` says of columns of codes what they stand for, or how many codes there are.
    Datasets are called x and y, or x.NAME and y, readable by every HDF5 since 1.8, contiguous and uncompressed (the fast way to
    train). An existing folder raises OutputError unless it is empty, or `overwrite` is set and it holds nothing but shards we
    wrote. Full disks and the like raise StorageError.
    """
    folder = Path(folder)
    inputs = {f"{PREFIX}{name}": values for name, values in x.items()} if isinstance(x, Mapping) else {"x": x}
    arrays = inputs | ({} if y is None else {"y": y})
    _check_values(inputs, y, kind, folder)
    n = next(iter(inputs.values())).shape[0]
    row_bytes = sum(int(np.prod(values.shape[1:], dtype=np.int64)) * values.dtype.itemsize for values in inputs.values())
    shard_rows = shard_rows or max(1, SHARD_BYTES // max(1, row_bytes))
    named = {name: f"/{PREFIX}{name}" for name in x} if isinstance(x, Mapping) else "/x"
    manifest: dict[str, Any] = {"format": FORMAT, "version": version_of(named), "kind": kind, "x": named,
                                "y": None if y is None else "/y",
                                "block": BLOCK, "classes": None if classes is None else list(classes),
                                "vocabulary": None if vocabulary is None else list(vocabulary), "shards": [],
                                **({} if categories is None else {"categories": dict(categories)})}
    with new_folder(folder, overwrite) as building:
        for i, start in enumerate(range(0, n, shard_rows)):
            part = slice(start, min(n, start + shard_rows))
            values = {label: np.ascontiguousarray(array[part]) for label, array in arrays.items()}
            manifest["shards"].append(write_shard(building / f"shard-{i:05d}.h5", values, kind))
        write_file(building / MANIFEST, [signed_text(manifest).encode()], write_error)
    return folder


def write_parts(folder: Path | str, parts: Mapping[str, tuple[Any, Any]], *, kind: str, classes: Sequence[str] | None = None,
                overwrite: bool = False) -> None:
    """Write (x, y) of parts by name, {"train": (x, y), "test": (x, y)}, each as shards in a folder of its own below `folder`.

    None is written unless all can be: half of a dataset would stand in the way of the whole one, or be mixed with another's.
    """
    folders = {Path(folder) / name: arrays for name, arrays in parts.items()}
    for place, (x, y) in folders.items():
        refuse_existing(place, overwrite)
        _check_values({"x": x}, y, kind, place)
    for place, (x, y) in folders.items():
        write_shards(place, x, y, kind=kind, classes=classes, overwrite=overwrite)


def write_classification(out: Path, x: Any, y: NDArray[Any], source: Path, overwrite: bool, classes: list[str] | None = None,
                         categories: Mapping[str, Sequence[str] | int] | None = None) -> Path:
    """Rows with class labels from 0 up, in the smallest unsigned type; unnamed classes are called by their numbers."""
    if not isinstance(x, Mapping) and len(x) != len(y):
        raise DataError(f"{len(x)} inputs but {len(y)} labels", file=source)
    if len(y) and y.min() < 0:
        row = int(np.flatnonzero(y < 0)[0])
        raise DataError(f"label {y[row]} is negative; classes are numbered from 0", file=source, row=row)
    classes = classes or [str(i) for i in range(int(y.max()) + 1 if len(y) else 0)]
    return write_shards(out, x, y.astype(np.min_scalar_type(len(classes))), kind="classification", classes=classes,
                        categories=categories, overwrite=overwrite)


def _check_values(inputs: Mapping[str, Rows], y: Rows | None, kind: str, folder: Path) -> None:
    assert kind in KINDS, kind
    (first, x), *others = inputs.items()
    for values in inputs.values():
        if values.shape[0] == 0:
            raise DataError("there are no rows to write", file=folder)
        if 0 in values.shape:
            raise DataError(f"the rows hold no values: the inputs' shape is {'x'.join(map(str, values.shape))}", file=folder)
    for name, values in others:
        if values.shape[0] != x.shape[0]:
            raise DataError(f"{x.shape[0]} rows of {first} but {values.shape[0]} of {name}; a sample is a row of each",
                            file=folder)
    if y is not None and y.shape[0] != x.shape[0]:
        raise DataError(f"{x.shape[0]} rows of {first} but {y.shape[0]} of y; each input needs one target", file=folder)
    for name, values in {**inputs, **({} if y is None else {"y": y})}.items():
        if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
            raise DataError(f"{name} has dtype {values.dtype}; only integers and floats of at most 8 bytes can be trained on",
                            file=folder, dataset=name)


@contextlib.contextmanager
def new_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and vanishes when it does not."""
    refuse_existing(folder, overwrite)
    building = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
    with storage_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        building.mkdir(mode=0o775)
    try:
        yield building
        with storage_errors(folder):
            sync_folder(building, write_error)
            old = folder.with_name(f".{folder.name}.old-{secrets.token_hex(4)}") if folder.exists() else None
            if old is not None:
                folder.rename(old)
            building.rename(folder)
            sync_folder(folder.parent, write_error)
            if old is not None:
                for file in filter(lambda file: OURS.fullmatch(file.name), old.iterdir()):
                    file.unlink()
                old.rmdir()
    except BaseException:
        for file in building.glob("*"):
            file.unlink()
        with contextlib.suppress(FileNotFoundError):       # The folder is gone where the rename went through.
            building.rmdir()
        raise


def refuse_existing(folder: Path, overwrite: bool) -> None:
    """OutputError unless `folder` may be written; an importer asks before a long read too."""
    if not os.path.lexists(folder):
        above = next((parent for parent in folder.parents if os.path.lexists(parent)), folder.parent)
        if above.exists() and not above.is_dir():
            raise OutputError("the output is not a folder; choose another --out", file=above)
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


def write_error(error: OSError, doing: str, path: Path, **_: Any) -> MpitrainError:
    """What the operating system refuses, as our error."""
    if isinstance(error, PermissionError):
        return AccessError(f"no permission to write here ({error.strerror})", file=error.filename or path)
    return StorageError(f"writing failed: {error.strerror or error}", file=error.filename or path)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise write_error(error, "writing", path) from error


def write_shard(path: Path, values: dict[str, NDArray[Any]], kind: str) -> dict[str, Any]:
    """Write one shard; its entry for the manifest."""
    entry: dict[str, Any] = {"file": path.name}
    for name, array in values.items():
        raw = little_endian(array)
        sums = [hashlib.sha256(raw[i:i + BLOCK]).hexdigest() for i in range(0, len(raw), BLOCK)]
        entry[name] = {"dtype": array.dtype.newbyteorder("<").str, "shape": list(array.shape), "sha256": sums}
    chunks, _ = lay_out(values, {"schema": f"{FORMAT} {VERSION}", "kind": kind})
    write_file(path, chunks, write_error)
    return entry | {"size": sum(map(len, chunks))}
