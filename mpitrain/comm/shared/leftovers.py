"""What killed jobs left on a node: found by MPI's names for it, and removed where no process uses it.

A node's /dev/shm is memory. What a job that was killed has left there is missing to the next one, until somebody removes it.
The folder of Open MPI 5's launcher has its process number. Left by a killed one, it ends a later launcher that gets the number,
before there is a rank ("PMIx server's listener thread failed to start").
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Mapping
from pathlib import Path

# Open MPI's segments for messages (5: sm, 4: vader) and files behind shared windows, MPICH's and Intel MPI's segments, and the
# lock files of `alive`. Most of these have a name for a moment only, so they stay where a job was killed in it.
OURS = re.compile(r"(sm_segment|vader_segment|osc_sm)\..+|mpich_(shm_|shar_tmp)\w+|Intel_MPI_\w+|mpitrain-(alive|shared)-\w+")
SHARED_MEMORY = Path("/dev/shm")
LIMITS = "mpitrain-limits-"      # records of `energy.guardian`
YOUNG = 10.0                     # seconds; a job that is just starting has made its file and not mapped it yet
HOST = {"ipc": "ipc:[4026531839]", "pid": "pid:[4026531836]"}      # Linux's fixed names of the host's own spaces
FOLDER = re.compile(r"ompi\.(\d+)")
ADDRESS = re.compile(r"tcp[46]://\[?([\w.:%]+?)\]?:(\d{1,5})$", re.MULTILINE)
ANSWER_S = 0.2                   # for a launcher on this host; who does not answer in it is not known to have ended
LAUNCHERS = ("prte", "mpi", "osh")        # prterun (mpirun itself), prted, prte, mpirun, mpiexec, oshrun


def remove_leftovers(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Removes what killed jobs of this user left on this node; a line for each place where there was any. Limits of the node that
    they have set, and whose guardian was killed, too, are put back."""
    own = Path(environment.get("PMIX_SERVER_TMPDIR", ""))     # where mpirun has started us, its folder lies beside the others
    folder = own.parent if FOLDER.fullmatch(own.name) else Path(environment.get("TMPDIR", "/tmp"))
    return [*undo_limits(SHARED_MEMORY),
            *filter(None, (remove_files(SHARED_MEMORY) if _sees_users() else "", remove_folders(folder)))]


def undo_limits(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        if any(name.startswith(LIMITS) for name in os.listdir(folder)):
            from mpitrain.energy.guardian import undo_leftovers
            return undo_leftovers(folder)
    return []


def _sees_users(spaces: Path = Path("/proc/self/ns")) -> bool:
    """False in a container with the host's shared memory and process numbers of its own: it does not see who uses it."""
    with contextlib.suppress(OSError):
        return os.readlink(spaces / "ipc") != HOST["ipc"] or os.readlink(spaces / "pid") == HOST["pid"]
    return True


def remove_folders(folder: Path, processes: Path = Path("/proc")) -> str:
    """Removes this user's folders of launchers of this host that have ended; a line that says so, or "" where there were none."""
    removed = []
    with contextlib.suppress(OSError):
        for name in sorted(filter(FOLDER.fullmatch, os.listdir(folder)) if processes.is_dir() else ()):
            with contextlib.suppress(OSError):                # another job of this user cleans up too
                about = os.lstat(folder / name)
                mine = stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and abs(time.time() - about.st_mtime) > YOUNG
                contact = _contact_here(folder / name)
                if mine and contact and not _launches(processes / name.partition(".")[2]) and not _answers(contact):
                    shutil.rmtree(folder / name)              # it follows no link
                    removed.append(name)
    return _told(removed, folder, "folders") if removed else ""


def _contact_here(folder: Path) -> Path | None:
    """The file with a launcher's address, None for one of another host: hosts may share the folder of folders, and know only
    their own processes. Its name has the host's."""
    host, number = socket.gethostname(), folder.name.partition(".")[2]
    return next(filter(Path.exists, (folder / f"pmix.{name}.tool.{number}" for name in (host, host.partition(".")[0]))), None)


def _answers(contact: Path) -> bool:
    """Whether a launcher may listen at its address, though no process here has its number, as in a container."""
    found = ADDRESS.search(contact.read_text(errors="replace"))
    if found is None:
        return True
    try:
        socket.create_connection((found[1], int(found[2])), ANSWER_S).close()
    except (TimeoutError, OverflowError):
        return True
    except OSError:                                           # refused, or no address of this host any more
        return False
    return True


def _launches(process: Path) -> bool:
    """Whether this process lives and is a launcher; a number is given again."""
    try:
        return (process / "comm").read_text(errors="replace").startswith(LAUNCHERS)
    except OSError:
        return process.exists()


def _told(removed: list[str], folder: Path, kind: str) -> str:
    names = f"{removed[0]} and {len(removed) - 1} more {kind}" if len(removed) > 1 else removed[0]
    return f"removed what killed jobs of yours left in {folder}: {names}"


def remove_files(folder: Path, processes: Path = Path("/proc")) -> str:
    """Removes this user's files in `folder` that no process has mapped or open; a line that says so, or "" where none were."""
    found = _unused(_candidates(folder), folder, processes)
    removed, freed = [], 0
    for name in sorted(found):
        with contextlib.suppress(OSError):                    # another job of this user cleans up too
            freed += (folder / name).stat().st_blocks * 512
            os.unlink(folder / name)
            removed.append(name)
    if not removed:
        return ""
    return f"{_told(removed, folder, 'files')}, {freed / 2**20:.1f} MiB"


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


def _unused(found: set[str], folder: Path, processes: Path) -> set[str]:
    """Those of these files in `folder` that no process of this user has mapped or open; nobody else may read what MPI makes.

    It looks at this process first, then at those started just before and after it: most files are this job's own, and a look at
    all processes took 0.1 s of 0.2 that each of many short runs in one job takes (110 processes, 2026-11).
    """
    own, start = os.getpid(), f"{folder}/"
    for process in sorted(map(int, filter(str.isdigit, os.listdir(processes))), key=lambda number: abs(number - own)):
        if not found:
            break
        with contextlib.suppress(OSError):                    # it has ended
            about = f"{processes}/{process}"
            if os.stat(about).st_uid != os.getuid():
                continue
            with open(f"{about}/maps", errors="replace") as maps:
                found = found - {line.partition(start)[2].rstrip("\n") for line in maps if start in line}
            for number in os.listdir(f"{about}/fd") if found else ():
                with contextlib.suppress(OSError):            # closed by now, as that by which this look at them was
                    found = found - {os.path.basename(os.readlink(f"{about}/fd/{number}"))}
    return found
