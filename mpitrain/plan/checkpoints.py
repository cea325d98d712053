"""The output of `mpitrain checkpoint list` and `verify`; without MPI."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from mpitrain.checkpoint import store
from mpitrain.checkpoint.folders import COMPLETE, MANIFEST, candidates, step_of
from mpitrain.checkpoint.hashes import total_sha256
from mpitrain.checkpoint.manifest import Checkpoint, load
from mpitrain.errors import CheckpointError, MissingError, MpitrainError
from mpitrain.plan.memory_lines import table
from mpitrain.train.build.from_config import checkpoint_folder

HEADS = ("step", "written", "MB", "parts", "mesh", "parameters_sha256", "state")
WHOLE = "complete"
FEW = 16                         # characters of a hash that tell two apart


def listed(path: Path) -> Iterator[str]:
    """A line for each checkpoint of a run, oldest first. Manifests are read, and the sizes of parts compared; values are not.
    Raises CheckpointError at the end if one is damaged."""
    rows = [_row(folder) for folder in _folders(path)]
    yield from table(HEADS, rows)
    _refuse(sum(row[-1] != WHOLE for row in rows), len(rows), path)


def _row(folder: Path) -> tuple[str, ...]:
    step = str(step_of(folder))
    try:
        found = store.named_rightly(load(folder))
    except MpitrainError as error:
        return step, "", "", "", "", "", f"damaged: {error}"
    when = datetime.fromtimestamp((folder / MANIFEST).stat().st_mtime).astimezone()
    size, mesh = sum(part.size for part in found.parts) / 1e6, found.meta.get("mesh")
    axes = " ".join(f"{axis}={n}" for axis, n in mesh.items() if n != 1) or "1 rank" if isinstance(mesh, dict) else ""
    return (step, when.isoformat(" ", "minutes"), f"{size:.1f}", str(len(found.parts)), axes, parameters_sha256(found)[:FEW],
            WHOLE)


def parameters_sha256(found: Checkpoint) -> str:
    """The hash that run.json has, from the hashes of the pieces; "" where an array has several, as its own is not known."""
    parameters = {name: array for name, array in found.arrays.items() if name.startswith("parameters/")}
    if any(len(array.pieces) > 1 for array in parameters.values()):
        return ""
    return total_sha256(f"{name.removeprefix('parameters/')}\t{array.dtype.name}\t{'x'.join(map(str, array.shape))}\t"
                        f"{array.pieces[0].sha256}\n" for name, array in parameters.items())


def verified(path: Path) -> Iterator[str]:
    """Reads every byte of a run's checkpoints, or of one, and compares every SHA-256: a line for each one that is whole, and for
    each defect. Raises CheckpointError at the end if there was one."""
    bad, folders = 0, _folders(path)
    for folder in folders:
        defects = list(_defects(folder))
        bad += bool(defects)
        yield from defects or [f"{folder.name}: whole, {_counted(load(folder))}"]
    _refuse(bad, len(folders), path)


def _refuse(bad: int, n: int, path: Path) -> None:
    """CheckpointError if some of `n` checkpoints are `bad`."""
    if bad:
        cure = "a run resumes from the newest whole one" if bad < n else "start the run again with --overwrite, or copy one back"
        raise CheckpointError(f"{bad} of {n} checkpoints are damaged; {cure}", file=path)


def _counted(found: Checkpoint) -> str:
    pieces = sum(len(array.pieces) for array in found.arrays.values())
    return f"{sum(part.size for part in found.parts):,} bytes read, {len(found.parts) + pieces:,} checksums right"


def _defects(folder: Path) -> Iterator[str]:
    try:
        found = store.named_rightly(load(folder))
    except MpitrainError as error:
        yield f"{folder.name}: {error}"
        return
    for index, part in enumerate(found.parts):
        try:
            found.verify_part(part)
        except MpitrainError as error:
            yield f"{folder.name}: {error}"
        for name, array in found.arrays.items():
            for piece in array.pieces:
                if piece.part == index:
                    try:
                        found.read_piece(name, piece)
                    except MpitrainError as error:
                        yield f"{folder.name}: {error}"


def _folders(path: Path) -> list[Path]:
    """The folders of checkpoints that `path` names, oldest first: a run, its folder of checkpoints, or one of them."""
    found = candidates(checkpoint_folder(path))[::-1] if path.is_dir() else []
    if not found and COMPLETE.fullmatch(path.name) and path.is_dir():
        found = [path]
    if not found:
        what = "" if path.is_dir() else ", found a file" if path.exists() else ", and there is nothing"
        raise MissingError(f"expected a run folder with checkpoints, or one checkpoint (step-...){what}", file=path)
    return found
