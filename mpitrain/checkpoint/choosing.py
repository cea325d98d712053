"""The checkpoint of a run that somebody wants: the newest one, that of a step, or the best."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mpitrain.checkpoint.folders import candidates, step_of
from mpitrain.checkpoint.manifest import Checkpoint, load
from mpitrain.checkpoint.store import ALONE, READ, Purpose, damage, latest
from mpitrain.comm.face import Objects
from mpitrain.comm.job.together import on_first
from mpitrain.errors import CheckpointError, MissingError

BEST = "best"                    # the checkpoint with the lowest validation loss, or the best of another metric, as a step


def chosen(folder: Path, step: int | str | None = None, channel: Objects = ALONE, purpose: Purpose = READ) -> Checkpoint:
    """The checkpoint of a step, the one with the lowest validation loss (`step` "best"), or (None) the newest that verifies.

    Called by every rank; it communicates. MissingError names the steps that there are.
    """
    if step is None:
        return latest(folder, channel, purpose)
    return load(folder / on_first(channel, lambda: _whole(folder, step, purpose)))


def _whole(folder: Path, step: int | str, purpose: Purpose) -> str:
    paths = {step_of(path): path for path in reversed(candidates(folder))}
    if not paths:
        raise MissingError(purpose.missing, file=folder)
    if step == BEST:
        best = load(paths[max(paths)]).meta.get("best")
        if not best:
            raise MissingError("this run has computed no validation loss, so none of its checkpoints is the best; name a step: "
                               f"{_listed(paths)}", file=folder)
        step = int(best[1])
    if step not in paths:
        raise MissingError(f"there is no checkpoint of step {step}; those of this run are of {_listed(paths)}", file=folder)
    if why := damage(paths[int(step)]):
        raise CheckpointError(f"{why}; {purpose.doing} another one may do: {_listed(paths)}", file=paths[int(step)])
    return paths[int(step)].name


def _listed(steps: Iterable[int]) -> str:
    found = sorted(steps)
    return ", ".join(map(str, found if len(found) <= 8 else [*found[:3], "...", *found[-3:]]))
