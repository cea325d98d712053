"""Reading a checkpoint: its manifest, which nobody has to trust, and the arrays it points to.

Arrays are read by the offsets in the manifest, never by libhdf5; every piece is compared with its SHA-256 as it is read.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain import errors
from mpitrain.checkpoint.folders import MANIFEST, PART
from mpitrain.errors import CheckpointError, MissingError, OtherModelError
from mpitrain.files import disk
from mpitrain.files.disk import DTYPES
from mpitrain.files.signed import body_sha256, parse

FORMAT, VERSION = "mpitrain checkpoint", 1
MANIFEST_LIMIT = 64 << 20        # bytes; 300 bytes a piece, so 200,000 pieces: refused before it is read into memory


@dataclass(frozen=True)
class StoredPiece:
    """Where one slice lies: `part` counts in `Checkpoint.parts`; `offset` in bytes."""
    part: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    sha256: str


@dataclass(frozen=True)
class StoredArray:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class Part:
    file: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is consistent; the arrays are verified as they are read."""
    folder: Path
    step: int
    meta: dict[str, Any]
    parts: tuple[Part, ...]
    arrays: dict[str, StoredArray]
    hashes: dict[str, str]           # as `State.hashes` gives them; without those that a checkpoint of before does not have

    def verify(self) -> None:
        """Read every byte and compare the SHA-256 of each part; CheckpointError names the file that differs."""
        for part in self.parts:
            self.verify_part(part)

    def verify_part(self, part: Part) -> None:
        found = disk.file_sha256(self.folder / part.file)
        if found != part.sha256:
            raise CheckpointError(f"the file is damaged: sha256 {found[:12]}.. is not {part.sha256[:12]}.. of the "
                                  f"manifest; use another checkpoint", file=self.folder / part.file)

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> np.ndarray:
        """The array `name`, or its slice of `shape` from `start`, put together from whichever parts hold it."""
        if name not in self.arrays:
            raise CheckpointError(f'has no array "{name}"{errors.nearest(name, self.arrays)}', file=self.folder)
        stored = self.arrays[name]
        start = (0,) * len(stored.shape) if start is None else tuple(start)
        shape = tuple(n - a for n, a in zip(stored.shape, start, strict=True)) if shape is None else tuple(shape)
        if not _inside(start, shape, stored.shape):
            raise errors.ShapeError(f"the slice of shape {shape} from {start} is not inside the stored shape {stored.shape}",
                                    file=self.folder, dataset=name)
        if len(stored.pieces) == 1:                       # this piece is the whole, since the pieces' sizes add up to it
            values = self.read_piece(name, stored.pieces[0])
            end = [a + n for a, n in zip(start, shape, strict=True)]
            return values if shape == stored.shape else values[_box(start, end, (0,) * len(start))].copy()
        out, filled = np.empty(shape, stored.dtype), np.zeros(shape, bool)
        for piece in stored.pieces:
            low = [max(a, b) for a, b in zip(start, piece.start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(start, shape, piece.start, piece.shape, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                values = self.read_piece(name, piece)
                out[_box(low, high, start)] = values[_box(low, high, piece.start)]
                filled[_box(low, high, start)] = True
        if not filled.all():
            raise CheckpointError(f"the pieces overlap and leave {out.size - int(filled.sum())} of {out.size} values open",
                                  file=self.folder, dataset=name)
        return out

    def read_piece(self, name: str, piece: StoredPiece) -> np.ndarray:
        """The values of one piece of the array `name`; CheckpointError where they are not those that were saved."""
        path, dtype = self.folder / self.parts[piece.part].file, self.arrays[name].dtype
        raw = np.empty(math.prod(piece.shape) * dtype.itemsize, np.uint8)
        with disk.reading(path) as fd:
            disk.read_fully(fd, raw.data, piece.offset, path)
        found = hashlib.sha256(raw.data).hexdigest()
        if found != piece.sha256:
            raise CheckpointError(f"the values are damaged: sha256 {found[:12]}.. is not {piece.sha256[:12]}.. of the manifest; "
                                  f"use another checkpoint", file=path, dataset=name, offset=piece.offset)
        return raw.view(dtype.newbyteorder("<")).reshape(piece.shape).astype(dtype, copy=False)

    def check_names(self, expected: Mapping[str, tuple[Sequence[int], Any]], prefix: str = "") -> None:
        """Compare the stored names under `prefix` with the model's: name -> (shape, dtype).

        OtherModelError counts the missing, unexpected and reshaped ones and names the first; call it before any weight is
        touched.
        """
        stored = {name: array for name, array in self.arrays.items() if name.startswith(prefix)}
        missing = [name for name in expected if name not in stored]
        unexpected = [name for name in stored if name not in expected]
        changed = []
        for name, (shape, dtype) in expected.items():
            if name in stored and (stored[name].shape, stored[name].dtype) != (tuple(shape), np.dtype(dtype)):
                changed.append(f"{name} is {_about(stored[name].shape, stored[name].dtype)} here and "
                               f"{_about(shape, np.dtype(dtype))} in the model")
        found = [f"{len(which)} {word} ({', '.join(which[:3])}{', ...' if len(which) > 3 else ''})"
                 for word, which in (("missing", missing), ("unexpected", unexpected), ("reshaped", changed)) if which]
        made = found_made if isinstance(found_made := self.meta.get("made"), dict) else {}
        if made and missing and prefix == "optimizer/" and not stored:
            raise CheckpointError(f"the checkpoint was made by mpitrain {made.get('by', '')} and has no state of an optimizer to "
                                  "go on with; begin a run from its weights: leave out --resume, set model.init_from to this "
                                  "run's folder and run.out to another", file=self.folder)
        if few := [name for name in missing if f"buffers/{name.removeprefix('parameters/')}" in self.arrays]:
            of = f", {made['of']}" if isinstance(made.get("of"), str) else ""
            raise OtherModelError(f"the checkpoint is of a quantized run: {len(few)} weights are in few bits "
                                  f"({', '.join(few[:3])}"
                                  f"{', ...' if len(few) > 3 else ''}), and the model has them in floats; take the run of floats "
                                  f"that it was made of{of}, or the config it was saved with", file=self.folder)
        if found:
            how = ", or what mpitrain merge makes of its run, which has adapters" if self._adapted() else ""
            raise OtherModelError(f"the checkpoint is of another model: {'; '.join(found)}; use the config it was saved "
                                  f"with{how}", file=self.folder)

    def _adapted(self) -> bool:
        """Whether it is of a run with adapters."""
        record = self.meta.get("experiment")
        keys = record.get("keys") if isinstance(record, dict) else None
        return bool(keys.get("lora.rank")) if isinstance(keys, dict) else False


def _inside(start: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> bool:
    return len(start) == len(shape) == len(whole) and all(
        min(a, n) >= 0 and a + n <= m for a, n, m in zip(start, shape, whole, strict=True))


def _box(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _about(shape: Sequence[int], dtype: np.dtype[Any]) -> str:
    return f"{dtype.name}[{','.join(map(str, shape))}]"


def load(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`; reads the manifest and the sizes of the parts, no array yet.

    MissingError if there is no such folder, CheckpointError for a manifest that is absent, damaged, of another format, or
    that does not fit its files.
    """
    if not folder.is_dir():
        raise MissingError("there is no checkpoint folder of this name", file=folder)
    path = folder / MANIFEST
    with disk.reading(path) as fd:
        size = os.fstat(fd).st_size
        if size > MANIFEST_LIMIT:
            raise CheckpointError(f"the manifest has {size} bytes; at most {MANIFEST_LIMIT} are read", file=path)
        raw = np.empty(size, np.uint8)
        disk.read_fully(fd, raw.data, 0, path)
    try:
        body = parse(raw.tobytes())
        return _parse(folder, body)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # Any error that the untrusted text causes in the parser is one error to the user.
        raise CheckpointError(f"the manifest is damaged: {errors.name_and_text(error)}", file=path) from None


def _parse(folder: Path, body: dict[str, Any]) -> Checkpoint:
    """Check every value of a manifest; ValueError (or the error of a wrong type) names the mistake."""
    _need(isinstance(body, dict) and body.get("format") == FORMAT, f'"format" is not "{FORMAT}"')
    if body.get("version") != VERSION:
        raise CheckpointError(f'format version {body.get("version")!r}, this mpitrain reads {VERSION}: use the mpitrain that '
                              f'wrote it', file=folder / MANIFEST)
    sha256 = body.pop("sha256")
    _need(body_sha256(body) == sha256, "its own sha256 does not match")
    _need(isinstance(body["meta"], dict), '"meta" is not an object')
    parts = tuple(_parse_part(folder, part) for part in body["parts"])
    _need(len({part.file for part in parts}) == len(parts), "two parts have one name")
    arrays = {name: _parse_array(name, about, parts) for name, about in body["arrays"].items()}
    used = [0] * len(parts)
    for array in arrays.values():
        for piece in array.pieces:
            used[piece.part] += math.prod(piece.shape) * array.dtype.itemsize
    for part, held in zip(parts, used, strict=True):
        _need(held <= part.size, f"{part.file} of {part.size} bytes cannot hold {held}")   # a small file must not fill memory
    hashes = {str(name): _digest(sha256) for name, sha256 in body.get("hashes", {}).items()}
    return Checkpoint(folder, _natural(body["step"]), body["meta"], parts, arrays, hashes)


def _parse_part(folder: Path, about: dict[str, Any]) -> Part:
    file = about["file"]
    _need(isinstance(file, str) and PART.fullmatch(file), f"{file!r} is not the name of a part")
    part = Part(file, _natural(about["size"]), _digest(about["sha256"]))
    with disk.reading(folder / file) as fd:
        size = os.fstat(fd).st_size
    if size != part.size:
        raise CheckpointError(f"the file has {size} bytes, its manifest says {part.size}: it is truncated or not the one that "
                              f"was saved", file=folder / file, offset=min(size, part.size))
    return part


def _parse_array(name: str, about: dict[str, Any], parts: Sequence[Part]) -> StoredArray:
    _need(name.isprintable() and not {"", ".", ".."} & set(name.split("/")), f"{name!r} is not the name of an array")
    _need(about["dtype"] in DTYPES, f"{name}: dtype {about['dtype']!r}")
    dtype, shape = np.dtype(about["dtype"]), _naturals(about["shape"])
    pieces = []
    for entry in about["pieces"]:
        piece = StoredPiece(_natural(entry["part"]), _naturals(entry["start"]), _naturals(entry["shape"]),
                            _natural(entry["offset"]), _digest(entry["sha256"]))
        _need(_inside(piece.start, piece.shape, shape), f"{name}: a piece lies outside the array")
        _need(piece.part < len(parts), f"{name}: there is no part {piece.part}")
        end = piece.offset + math.prod(piece.shape) * dtype.itemsize
        _need(end <= parts[piece.part].size, f"{name}: a piece ends at byte {end}, behind the end of its file")
        pieces.append(piece)
    held, size = sum(math.prod(piece.shape) for piece in pieces), math.prod(shape)
    _need(held == size, f"{name}: the pieces hold {held} of {size} values")
    return StoredArray(dtype, shape, tuple(pieces))


def _need(ok: object, what: str) -> None:
    if not ok:
        raise ValueError(what)


def _natural(value: Any) -> int:
    _need(type(value) is int and 0 <= value < 1 << 62, f"{value!r} is not a count")
    return int(value)


def _naturals(values: Any) -> tuple[int, ...]:
    _need(isinstance(values, list) and len(values) <= 32, f"{values!r} is not a shape")
    return tuple(map(_natural, values))


def _digest(value: Any) -> str:
    _need(isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value), f"{value!r} is not a SHA-256")
    return str(value)
