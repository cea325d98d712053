"""A manifest for HDF5 files that somebody else has written, so that damage to them is seen before their values are used."""

from __future__ import annotations

import base64
import hashlib
import math
import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.columns import Asked, labels_of
from mpitrain.data.manifest import BLOCK, FORMAT, MANIFEST, version_of
from mpitrain.data.probe import describe
from mpitrain.data.shards import Dataset
from mpitrain.data.storage import File
from mpitrain.data.writing import write_error
from mpitrain.errors import OutputError
from mpitrain.files.disk import sync_folder, write_file
from mpitrain.files.signed import signed_text


def index(folder: Path | str, *, x: Asked | None = None, y: str | None = None) -> tuple[int, int]:
    """Write ``manifest.json`` beside the HDF5 files of `folder`, with a SHA-256 of each MiB or chunk: (rows, checksums).

    The files are read twice and left as they are: first every chunk is decoded, then the sums are taken. OutputError where there
    is a manifest, or where `folder` is a file; DataError for what cannot be read.
    """
    folder = Path(folder)
    if folder.is_file():
        raise OutputError("is a file, and a manifest belongs to a folder: move the file into one of its own", file=folder)
    if (folder / MANIFEST).exists():
        raise OutputError(f"there is a {MANIFEST}: `data verify` compares it with the files; delete it to make a new one",
                          file=folder)
    description = describe(folder, x=x, y=y)
    with closing(Dataset(description)) as dataset:
        dataset.verify()
    manifest = {"format": FORMAT, "version": version_of(description["x"]), "kind": description["kind"], "x": description["x"],
                "y": description["y"], "block": BLOCK, "classes": None, "vocabulary": None,
                "shards": [_entry(shard, description["host"]) for shard in description["shards"]]}
    new = folder / f".{MANIFEST}.tmp-{secrets.token_hex(4)}"         # an interrupted one is no manifest
    try:
        write_file(new, [signed_text(manifest).encode()], write_error)
        new.rename(folder / MANIFEST)
        sync_folder(folder, write_error)
    finally:
        new.unlink(missing_ok=True)
    sums = sum(len(shard[label]["sha256"]) for shard in manifest["shards"] for label in labels_of(shard))
    return len(dataset), sums


def _entry(shard: dict[str, Any], host: str) -> dict[str, Any]:
    file = File(shard, host)
    try:
        entry: dict[str, Any] = {"file": file.path.name, "size": shard["size"]}
        for label in labels_of(shard):
            field = shard[label]
            sums = [hashlib.sha256(piece).hexdigest() for piece in _pieces(file, field)]
            entry[label] = {"dtype": field["dtype"], "shape": field["shape"], "sha256": sums}
        file.check()
    finally:
        file.close()
    return entry


def _pieces(file: File, field: dict[str, Any]) -> Iterator[bytes]:
    """The bytes under each checksum, as `manifest` divides a described dataset."""
    if field["storage"] == "chunked":
        for offset, size in zip(field["offsets"], field["sizes"]):
            yield file.read(offset, size, field["name"])
        return
    n_bytes = math.prod(field["shape"]) * np.dtype(field["dtype"]).itemsize
    inline = base64.b64decode(field["data"]) if "data" in field else b""
    for start in range(0, n_bytes, BLOCK):
        size = min(BLOCK, n_bytes - start)
        yield inline[start:start + size] if inline else file.read(field["offset"] + start, size, field["name"])
