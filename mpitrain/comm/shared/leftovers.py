"""Files that killed jobs left in shared memory: found by MPI's names for them, and removed where no process uses them.

A node's /dev/shm is memory. What a job that was killed has left there is missing to the next one, until somebody removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from pathlib import Path

# Open MPI's segments for messages (5: sm, 4: vader) and files behind shared windows, and the lock files of `alive`. The last two
# have a name for a moment only, so they stay where a job was killed in it.
OURS = re.compile(r"(sm_segment|vader_segment|osc_sm)\..+|mpitrain-(alive|shared)-\w+")
SHARED_MEMORY = Path("/dev/shm")
YOUNG = 10.0                     # seconds; a job that is just starting has made its file and not mapped it yet


def remove_leftovers(folder: Path, processes: Path = Path("/proc")) -> str:
    """Removes this user's files in `folder` that no process has mapped or open; a line that says so, or "" where none were."""
    found = _candidates(folder)
    if found:
        found -= _in_use(folder, processes)
    removed, freed = [], 0
    for name in sorted(found):
        with contextlib.suppress(OSError):                    # another job of this user cleans up too
            freed += (folder / name).stat().st_blocks * 512
            os.unlink(folder / name)
            removed.append(name)
    if not removed:
        return ""
    files = f"{removed[0]} and {len(removed) - 1} more files" if len(removed) > 1 else removed[0]
    return f"removed what killed jobs of yours left in {folder}: {files}, {freed / 2**20:.1f} MiB"


def _candidates(folder: Path) -> set[str]:
    """Names of plain files of this user, made a while ago, as MPI would call them."""
    found = set()
    with contextlib.suppress(OSError):
        for name in filter(OURS.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError):
                about = os.lstat(folder / name)
                if stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and abs(time.time() - about.st_mtime) > YOUNG:
                    found.add(name)
    return found


def _in_use(folder: Path, processes: Path) -> set[str]:
    """Names of files in `folder` that a process of this user has mapped or open; nobody else may read what MPI makes."""
    used, start = set(), f"{folder}/"
    for process in filter(str.isdigit, os.listdir(processes)):
        with contextlib.suppress(OSError):                    # it has ended
            if os.stat(processes / process).st_uid != os.getuid():
                continue
            for line in (processes / process / "maps").read_text(errors="replace").splitlines():
                path = line.partition(start)[2]
                if path:
                    used.add(path)
            for number in os.listdir(processes / process / "fd"):
                used.add(os.path.basename(os.readlink(processes / process / "fd" / number)))
    return used
