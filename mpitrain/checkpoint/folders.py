"""Folders of checkpoints: their names, and how they are renamed and deleted so that no half of one has a final name."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from mpitrain.files.disk import storage_error

MANIFEST = "manifest.json"
PART = re.compile(r"part-[0-9]{5,9}\.h5")
COMPLETE = re.compile(r"step-([0-9]{8,15})(\.old-[0-9a-f]{8})?")   # .old: stepped aside for a new save of the same step
UNFINISHED = re.compile(r"step-[0-9]{8,15}\.tmp-[0-9a-f]{8}")


def entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(error, "listing the folder", folder) from error


def candidates(folder: Path, *, links: bool = False) -> list[Path]:
    """The finished checkpoints in `folder`, newest step first, told by their names alone (never by file times).

    A symbolic link is not one: no run makes them, and its target may belong to another. `links` names it all the same.
    """
    try:
        found = [folder / name for name in entries(folder)
                 if COMPLETE.fullmatch(name) and (links or not (folder / name).is_symlink())]
    except OSError as error:
        raise storage_error(error, "looking at checkpoints", folder) from error
    return sorted(found, key=lambda path: (step_of(path), ".old" not in path.name), reverse=True)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    match = COMPLETE.fullmatch(path.name)
    assert match, f"{path} is not the folder of a checkpoint"
    return int(match[1])


def sweep(folder: Path, but: str = "") -> None:
    """Delete replaced checkpoints and a killed run's unfinished ones; put back those it had moved aside for nothing.

    The folder named `but` is being written.
    """
    names = set(entries(folder)) - {but}
    for name in sorted(names):
        match = COMPLETE.fullmatch(name)
        if UNFINISHED.fullmatch(name):
            remove_ours(folder / name)
        elif match and match[2] and f"step-{match[1]}" in names:
            discard(folder / name)
        elif match and match[2]:
            rename(folder / name, folder / f"step-{match[1]}")


def holds_only_ours(path: Path) -> bool:
    try:
        return path.is_dir() and all(name == MANIFEST or PART.fullmatch(name) for name in entries(path))
    except OSError as error:
        raise storage_error(error, "looking at a checkpoint", path) from error


def rename(path: Path, to: Path) -> None:
    try:
        os.rename(path, to)
    except OSError as error:
        raise storage_error(error, "renaming a checkpoint", path) from error


def discard(path: Path) -> None:
    """Delete a finished checkpoint; renamed first, so that no half of one ever has a final name."""
    doomed = path.with_name(f"{path.name.partition('.')[0]}.tmp-{secrets.token_hex(4)}")
    rename(path, doomed)
    remove_ours(doomed)


def remove_ours(path: Path) -> None:
    """Delete the files that `save` makes, and the folder unless something else is in it."""
    try:
        if path.is_symlink() or not path.is_dir():
            return
        for name in sorted(entries(path)):               # the manifest goes first: the rest alone cannot be loaded
            if name == MANIFEST or PART.fullmatch(name):
                os.unlink(path / name)
        if not entries(path):
            os.rmdir(path)
    except OSError as error:
        raise storage_error(error, "deleting an old checkpoint", path) from error


def remove_all(folder: Path) -> list[Path]:
    """Delete every checkpoint in `folder`, finished or not, for a run that starts anew; returns what could not go.

    A checkpoint's folder with something else in it keeps that under an unfinished one's name, so that no later run takes it
    for a checkpoint of its own. A link stays, too.
    """
    for path in candidates(folder):
        discard(path)
    sweep(folder)
    return [folder / name for name in sorted(entries(folder)) if UNFINISHED.fullmatch(name) or COMPLETE.fullmatch(name)]
