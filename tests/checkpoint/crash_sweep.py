"""Faults at every system call of a save: a layer over `os`, and a sweep in forked children. Not a test by itself.

``python crash_sweep.py FOLDER SCENARIO`` forks a child for each (fault, k): the child saves with the fault at its k-th
call, and the parent then looks at what is on the disk. It prints one JSON object; "bad" lists what must not be.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import h5py  # noqa: F401  (imported before the fork, so that children start at once)
import numpy as np

from mpitrain.checkpoint import folders, store
from mpitrain.checkpoint.manifest import load
from mpitrain.checkpoint.parts import Piece
from mpitrain.checkpoint.saver import Saver
from mpitrain.checkpoint.store import Alone
from mpitrain.errors import MpitrainError

CALLS = ("mkdir", "open", "close", "posix_fallocate", "pwrite", "fsync", "rename", "unlink", "rmdir", "preadv", "listdir", "stat")
KILLED, CLEAN, DIRTY = 9, 7, 99


class Faults:
    """Counts the calls in `CALLS`, and lets `act` replace call number `at` (and all later ones, if `stays`)."""

    def __init__(self, at: int, act: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any], *, stays: bool = False):
        self.at, self.act, self.stays, self.count = at, act, stays, 0
        self.saved = {name: getattr(os, name) for name in CALLS}

    def __enter__(self) -> Faults:
        for name, call in self.saved.items():
            setattr(os, name, self._wrapped(name, call))
        return self

    def __exit__(self, *_: object) -> None:
        for name, call in self.saved.items():
            setattr(os, name, call)

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at or (self.stays and self.count > self.at):
                return self.act(name, partial(call, **kwargs), args)
            return call(*args, **kwargs)
        return wrapped


def kill(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Die at the call; in the middle of it, if it is a write."""
    if name == "pwrite":
        call(args[0], bytes(args[1][:len(args[1]) // 2]), args[2])
    os._exit(KILLED)


def failing(number: int) -> Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]:
    def act(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if name == "close":
            call(*args)                                       # as Linux does: closed, and an error all the same
        raise OSError(number, os.strerror(number))
    return act


def short(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A write that writes half of what it got, as the system may; every other call as it is."""
    return call(args[0], bytes(args[1][:(len(args[1]) + 1) // 2]), args[2]) if name == "pwrite" else call(*args)


FAULTS: dict[str, tuple[Callable[..., Any], bool]] = {
    "kill": (kill, False), "EIO": (failing(errno.EIO), False), "ENOSPC from here on": (failing(errno.ENOSPC), True),
    "EDQUOT": (failing(errno.EDQUOT), False), "short write": (short, False)}


def values(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((50, 40))


def save(folder: Path, step: int, content: int) -> Path:
    pieces = [Piece.whole("parameters/w", values(content)), Piece.whole("optimizer/m/w", -values(content))]
    return store.save(folder, step, pieces, {"content": content})


def scenario_next(folder: Path) -> None:
    """The usual: a new step, then the old one is pruned."""
    store.prune(folder, 1, verified=save(folder, 2, content=2))


def scenario_again(folder: Path) -> None:
    """A step that is there already is saved again."""
    save(folder, 1, content=2)


def scenario_asynchronous(folder: Path) -> None:
    """As `next`, by the thread that writes while training goes on and changes what is being saved."""
    trained = values(2)
    saver = Saver(folder, Alone(), lambda step: [Piece.whole("parameters/w", trained), Piece.whole("optimizer/m/w", -trained)],
                  published=lambda meta, written: store.prune(folder, 1, verified=written))
    saver.start(2, {"content": 2})
    trained[...] = 0.0
    saver.finish()


def complaints(folder: Path) -> list[str]:
    """What is wrong with the folder, by a look at every checkpoint under a final name."""
    found = []
    whole = 0
    for path in folders.candidates(folder):
        try:
            stored = load(path)
            stored.verify()
            expected = values(stored.meta["content"])
            if not all(np.array_equal(sign * stored.read(name), expected) for name, sign in (("parameters/w", 1),
                                                                                             ("optimizer/m/w", -1))):
                found.append(f"{path.name}: a mix")
            whole += 1
        except MpitrainError as error:
            found.append(f"{path.name}: published, but {error}")
    return found if whole else [*found, "no checkpoint left"]


def sweep(base: Path, scenario: Callable[[Path], None], names: Sequence[str] = tuple(FAULTS)) -> dict[str, Any]:
    points, bad, clean = 0, [], 0
    save(base / "start", 1, content=1)
    for fault in names:
        act, stays = FAULTS[fault]
        k, status = 0, -1
        while status != 0 or k == 0:
            k += 1
            folder = base / f"{fault}-{k}"
            shutil.copytree(base / "start", folder)
            child = os.fork()
            if child == 0:
                os._exit(_child(folder, scenario, k, act, stays))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            where = f"{fault} at call {k}"
            bad += [f"{where}: {text}" for text in complaints(folder)]
            if code not in (0, 1, CLEAN, KILLED):
                bad.append(f"{where}: exit {code}")
            if code in (0, 1) and store.latest(folder).meta["content"] != 2:
                bad.append(f"{where}: said it saved, but did not")
            save(folder, 3, content=3)                        # the next save works, and clears what was left
            bad += [f"{where}: {name} is left" for name in os.listdir(folder) if "." in name]
            clean += code == CLEAN
            points += code != 0
            status = code
            shutil.rmtree(folder)
    return {"points": points, "clean": clean, "bad": bad}


def _child(folder: Path, scenario: Callable[[Path], None], k: int, act: Callable[..., Any], stays: bool) -> int:
    """0: nothing was left to break; 1: it succeeded in spite of the fault; CLEAN: one of our errors."""
    try:
        with Faults(k, act, stays=stays) as faults:
            scenario(folder)
        return 1 if faults.count >= k else 0
    except MpitrainError:
        return CLEAN
    except BaseException as error:
        print(f"call {k}: {error!r}", file=sys.stderr, flush=True)
        return DIRTY


SCENARIOS = {"next": scenario_next, "again": scenario_again, "asynchronous": scenario_asynchronous}

if __name__ == "__main__":
    print(json.dumps(sweep(Path(sys.argv[1]), SCENARIOS[sys.argv[2]])))
