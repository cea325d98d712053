"""The pieces of named arrays that a rank has, the part file it makes of them, and the manifest of all ranks' parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.checkpoint.hashes import stored_hashes
from mpitrain.checkpoint.manifest import FORMAT, VERSION
from mpitrain.errors import StorageError
from mpitrain.files import hdf5_file
from mpitrain.files.signed import signed_text


@dataclass(frozen=True)
class Piece:
    """This rank's slice of a named array: `array` begins at index `start` of an array of `global_shape`."""
    name: str
    array: np.ndarray
    global_shape: tuple[int, ...]
    start: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, array: np.ndarray) -> Piece:
        return cls(name, array, array.shape, (0,) * array.ndim)

    @property
    def dataset(self) -> str:
        """The piece's path in the part file: the name, and the slice if it is one."""
        if self.array.shape == self.global_shape:
            return self.name
        return f"{self.name}[{','.join(f'{a}:{a + n}' for a, n in zip(self.start, self.array.shape, strict=True))}]"


def write_part(work: Path, part: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
    if not pieces:
        return None
    if not work.is_dir():
        raise StorageError("this rank does not see the folder that rank 0 made: run.out must be on a file system that all "
                           "nodes share", file=work)
    arrays = {piece.dataset: piece.array for piece in pieces}
    assert len(arrays) == len(pieces), "two pieces of one part have the same name and place"
    path = work / f"part-{part:05d}.h5"
    size, sha256, places = hdf5_file.write_hdf5(path, arrays)
    return {"file": path.name, "size": size, "sha256": sha256, "pieces": [
        {"name": piece.name, "dtype": piece.array.dtype.name, "global_shape": list(piece.global_shape),
         "start": list(piece.start), "shape": list(piece.array.shape), "offset": offset, "sha256": digest}
        for piece, (offset, digest) in zip(pieces, places.values(), strict=True)]}


def manifest_text(step: int, meta: Mapping[str, Any], parts: Sequence[dict[str, Any] | None]) -> str:
    """The manifest of what `write_part` returned on all ranks, in rank order."""
    written = [dict(part) for part in parts if part is not None]
    arrays: dict[str, Any] = {}
    for index, part in enumerate(written):
        for piece in map(dict, part.pop("pieces")):
            name, about = piece.pop("name"), {"dtype": piece.pop("dtype"), "shape": piece.pop("global_shape"), "pieces": []}
            known = arrays.setdefault(name, about)
            assert (known["dtype"], known["shape"]) == (about["dtype"], about["shape"]), f"ranks disagree about {name}"
            known["pieces"].append({"part": index, **piece})
    body = {"format": FORMAT, "version": VERSION, "step": step, "meta": dict(meta), "parts": written, "arrays": arrays,
            "hashes": stored_hashes(arrays)}
    body = json.loads(json.dumps(body))                   # as a reader will see it: keys are strings
    return signed_text(body)
