"""Checkpoints: named arrays on the disk that are whole or not there, whatever happens while they are written.

    checkpoints/step-00000100/manifest.json      step, meta, and for each array: dtype, global shape, where its pieces lie
                              part-00000.h5      pieces from one writing rank, an ordinary HDF5 file

A rank writes the slices it holds, under global names, so any other layout of ranks can read them back. Everything goes to
`step-00000100.tmp-NONCE` first; each part is synced and read again, the manifest with all SHA-256 sums comes last, and one
rename publishes the whole. Reading uses the offsets in the manifest and never libhdf5, and trusts nothing it reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.checkpoint.manifest import FORMAT, MANIFEST, PART, VERSION, Checkpoint, body_sha256, load
from mpitrain.comm.face import Objects
from mpitrain.comm.job.together import attempt, on_first, value_of
from mpitrain.errors import CheckpointError, MissingError, MpitrainError, StorageError
from mpitrain.files import disk, hdf5_file
from mpitrain.files.disk import storage_error

COMPLETE = re.compile(r"step-([0-9]{8,15})(\.old-[0-9a-f]{8})?")   # .old: stepped aside for a new save of the same step
UNFINISHED = re.compile(r"step-[0-9]{8,15}\.tmp-[0-9a-f]{8}")


class Alone:
    """The channel of a program that runs without MPI."""
    rank, size = 0, 1

    def gather_objects(self, value: Any, /) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any, /) -> Any:
        return value


ALONE = Alone()

@dataclass(frozen=True)
class Purpose:
    """The purpose of a checkpoint, in the words of `latest`: on passing damaged ones over, and if there is none."""
    doing: str
    missing: str


READ = Purpose("reading", "there is no checkpoint in this folder; it must be that of a run's checkpoints")
RESUME = Purpose("resuming from", "there is no checkpoint to resume from; start the run without --resume")
EVALUATE = Purpose("evaluating", "there is no checkpoint to evaluate; train the run until it has saved one")
START = Purpose("model.init_from: starting from", "model.init_from names neither a run folder nor a folder of checkpoints")


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


# ---- saving ----------------------------------------------------------------------------------------------------------

def save(folder: Path, step: int, pieces: Sequence[Piece], meta: Mapping[str, Any], channel: Objects = ALONE) -> Path:
    """Write `folder/step-N` and return it once it is on the disk, verified. Called by every rank; it communicates.

    A rank with pieces writes the part file of its number; a rank without writes nothing. `meta` (rank 0's) is any JSON with
    finite numbers. If one rank fails, every rank raises that error, and earlier checkpoints stay as they were.
    """
    final = folder / f"step-{step:08d}"
    first = channel.rank == 0
    work = folder / on_first(channel, lambda: _open_work(final))
    try:
        mine = attempt(lambda: _write_part(work, channel.rank, pieces))
        everyone = channel.gather_objects(mine)
        on_first(channel, lambda: _publish(work, final, step, meta, everyone or []))
    except BaseException:
        if first:
            with contextlib.suppress(MpitrainError):     # the first error is the one to report; the next save cleans up
                _remove_ours(work)
        raise
    return final


def _open_work(final: Path) -> str:
    disk.make_folder(final.parent)
    _sweep(final.parent)
    work = final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")
    disk.make_folder(work)
    return work.name


def _sweep(folder: Path) -> None:
    """Delete replaced checkpoints and a killed run's unfinished ones; put back those it had moved aside for nothing."""
    names = set(_entries(folder))
    for name in sorted(names):
        match = COMPLETE.fullmatch(name)
        if UNFINISHED.fullmatch(name):
            _remove_ours(folder / name)
        elif match and match[2] and f"step-{match[1]}" in names:
            _discard(folder / name)
        elif match and match[2]:
            _rename(folder / name, folder / f"step-{match[1]}")


def _write_part(work: Path, part: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
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


def _publish(work: Path, final: Path, step: int, meta: Mapping[str, Any], outcomes: Sequence[dict[str, Any]]) -> None:
    """Rank 0: write the manifest of everyone's parts, read it again, and give the folder its final name."""
    written = [part for part in map(value_of, outcomes) if part is not None]
    arrays: dict[str, Any] = {}
    for index, part in enumerate(written):
        for piece in part.pop("pieces"):
            name, about = piece.pop("name"), {"dtype": piece.pop("dtype"), "shape": piece.pop("global_shape"), "pieces": []}
            known = arrays.setdefault(name, about)
            assert (known["dtype"], known["shape"]) == (about["dtype"], about["shape"]), f"ranks disagree about {name}"
            known["pieces"].append({"part": index, **piece})
    body = {"format": FORMAT, "version": VERSION, "step": step, "meta": dict(meta), "parts": written, "arrays": arrays}
    body = json.loads(json.dumps(body))                   # as a reader will see it: keys are strings
    text = json.dumps({**body, "sha256": body_sha256(body)}, indent=1)
    disk.write_file(work / MANIFEST, [text.encode()])
    disk.sync_folder(work)
    load(work)                                            # a hole, an overlap, a wrong size: nothing like it is published
    if final.is_dir():                                    # a checkpoint of this step, perhaps damaged, steps aside
        _rename(final, final.with_name(f"{final.name}.old-{secrets.token_hex(4)}"))
    _rename(work, final)
    disk.sync_folder(final.parent)
    _sweep(final.parent)


# ---- choosing and deleting -------------------------------------------------------------------------------------------

def candidates(folder: Path) -> list[Path]:
    """The finished checkpoints in `folder`, newest step first, told by their names alone (never by file times).

    A symbolic link is not one: no run makes them, and its target may belong to another.
    """
    found = [folder / name for name in _entries(folder) if COMPLETE.fullmatch(name) and not (folder / name).is_symlink()]
    return sorted(found, key=lambda path: (step_of(path), ".old" not in path.name), reverse=True)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    match = COMPLETE.fullmatch(path.name)
    assert match, f"{path} is not the folder of a checkpoint"
    return int(match[1])


def latest(folder: Path, channel: Objects = ALONE, purpose: Purpose = READ) -> Checkpoint:
    """The newest checkpoint that verifies. Called by every rank; it communicates: rank 0 reads and decides.

    Damaged ones are passed over with one warning that names them. MissingError if there is none at all, CheckpointError
    listing what was tried if none is whole: a run never starts again from step 0 by itself.
    """
    name = on_first(channel, lambda: _newest_whole(folder, purpose))
    return load(folder / name)


def _newest_whole(folder: Path, purpose: Purpose) -> str:
    bad: list[str] = []
    for path in candidates(folder):
        if damage := _damage(path):
            bad.append(f"{path.name}: {damage}")
            continue
        if bad:
            print_warning(f"{purpose.doing} {path.name}: newer checkpoints are damaged ({'; '.join(bad)})")
        return path.name
    if bad:
        raise CheckpointError(f"none of the checkpoints is whole; tried {'; '.join(bad)}", file=folder)
    raise MissingError(purpose.missing, file=folder)


def print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def prune(folder: Path, keep: int, *, best: int | None = None, verified: Path | None = None) -> list[Path]:
    """Delete all but the newest `keep` checkpoints and that of step `best`; returns the deleted ones. Rank 0 calls it.

    Nothing is deleted unless one of the remaining ones is whole: `verified` (returned by `save`) is known to be, otherwise
    they are read. A folder that holds a file of someone else's is left alone.
    """
    assert keep >= 1, "the last checkpoint is never deleted"
    paths = candidates(folder)
    stay = [path for i, path in enumerate(paths) if i < keep or step_of(path) == best]
    go = [path for path in paths if path not in stay and path.is_dir()
          and all(name == MANIFEST or PART.fullmatch(name) for name in _entries(path))]
    if not go or not (verified in stay or not all(map(_damage, stay))):
        return []
    for path in reversed(go):                             # oldest first
        _discard(path)
    return go


def _damage(path: Path) -> str:
    """What is wrong with a checkpoint; nothing where it verifies."""
    try:
        load(path).verify()
    except (CheckpointError, StorageError) as error:
        return str(error)
    return ""


def _rename(path: Path, to: Path) -> None:
    try:
        os.rename(path, to)
    except OSError as error:
        raise storage_error(error, "renaming a checkpoint", path) from error


def _discard(path: Path) -> None:
    """Delete a finished checkpoint; renamed first, so that no half of one ever has a final name."""
    doomed = path.with_name(f"step-{step_of(path):08d}.tmp-{secrets.token_hex(4)}")
    _rename(path, doomed)
    _remove_ours(doomed)


def _remove_ours(path: Path) -> None:
    """Delete the files that `save` makes, and the folder unless something else is in it."""
    if path.is_symlink() or not path.is_dir():
        return
    try:
        for name in sorted(_entries(path)):               # the manifest goes first: the rest alone cannot be loaded
            if name == MANIFEST or PART.fullmatch(name):
                os.unlink(path / name)
        if not _entries(path):
            os.rmdir(path)
    except OSError as error:
        raise storage_error(error, "deleting an old checkpoint", path) from error


def remove_all(folder: Path) -> None:
    """Delete every checkpoint in `folder`, finished or not; for a run that starts anew.

    A checkpoint's folder with something else in it keeps that under an unfinished one's name, so that no later run takes it
    for a checkpoint of its own.
    """
    for path in candidates(folder):
        _discard(path)
    _sweep(folder)


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(error, "listing the folder", folder) from error
