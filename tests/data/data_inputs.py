"""Inputs that several data tests make."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpitrain.files.signed import signed_text

CORPUS = Path(__file__).parent / "corpus"


def features(n: int, *row: int, seed: int = 0, dtype: str = "f4") -> np.ndarray[Any, Any]:
    values = np.random.default_rng(seed).standard_normal((n, *row)) * 100
    return values.astype(dtype)


def in_chunks(folder: Path) -> Path:
    """A folder of shards as another program may write it: in compressed chunks, each with a checksum in the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for shard in manifest["shards"]:
        path = folder / shard["file"]
        with h5py.File(path) as file:
            arrays = {name: file[name][()] for name in file}
        with h5py.File(path, "w", libver="earliest") as file:
            for name, array in arrays.items():
                data = file.create_dataset(name, data=array, chunks=array.shape, compression="gzip", shuffle=True)
                shard[name]["sha256"] = [hashlib.sha256(data.id.read_direct_chunk((0,) * array.ndim)[1]).hexdigest()]
        shard["size"] = path.stat().st_size
    del manifest["sha256"]
    (folder / "manifest.json").write_text(signed_text(manifest))
    return folder
