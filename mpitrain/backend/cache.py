"""A private folder for what is compiled on this machine: Numba's code and our native libraries.

Compiled code is loaded without further questions, so the folder must belong to this user and to nobody else; a
read-only home (containers, some batch nodes) must not stop a run, so a per-user folder under the temporary directory
stands in.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

WAIT, LOOK = 120.0, 0.02       # Seconds to wait for another process that compiles, and between two looks.


@cache
def cache_folder() -> Path:
    """`$MPITRAIN_CACHE_DIR`, else ``~/.cache/mpitrain``, else a folder of our own under the temporary directory."""
    wanted = [os.environ.get("MPITRAIN_CACHE_DIR"),
              os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "mpitrain"),
              os.path.join(tempfile.gettempdir(), f"mpitrain-{os.getuid()}")]
    for path in filter(None, wanted):
        folder = Path(path)
        if _usable(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix="mpitrain-"))      # No shared folder can be trusted: this run compiles anew.


def _usable(folder: Path) -> bool:
    """Ours, writable, and closed to others."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError:
        return False
    private = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022
    return private and os.access(folder, os.W_OK | os.X_OK)


@contextmanager
def one_at_a_time(name: str, wait: float | None = None) -> Iterator[bool]:
    """Inside, no other process that has this cache folder works under this name: the first compiles, the others wait for it, so
    many seconds at most, or WAIT. False inside where another has been at it all that time.

    A process that ends lets go. One that takes longer than any compiler is not waited for, and neither is anybody where the
    file system has no locks, or no room for one: then several do the same work, and each renames its result into place.
    """
    try:
        handle = os.open(cache_folder() / f"{name}.lock", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError:                               # The folder is full; the library's own writing will fail and say so.
        yield True
        return
    with open(handle, "wb") as file:
        end, mine = time.monotonic() + (WAIT if wait is None else wait), False
        while not mine:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            except BlockingIOError:
                if time.monotonic() >= end:
                    break
                time.sleep(LOOK)
            except OSError:                       # This file system has no locks.
                mine = True
        yield mine


def prepare_numba(version: str) -> None:
    """Points Numba's cache at our folder unless the user chose one; to be called before Numba is imported.

    Numba compiles a function anew where its file has changed, not where a file has of which it calls something: `version` stands
    for the content of them all.
    """
    if "numba" not in sys.modules:
        os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / f"numba-{version}"))
