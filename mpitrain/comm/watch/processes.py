"""What /proc says of the processes of this node. The watcher uses it too, which imports little."""

from __future__ import annotations

import os

from mpitrain.comm.watch.ignoring import ignoring

STOPPED = ("T", "t")                      # states of proc(5): by a signal, by a debugger
PARENT, BORN = 1, 19                      # fields of `stat`, of which the state is the first
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def stat(process: object) -> list[str]:
    """The fields of proc(5)'s stat from the state on, of a process or "PID/task/THREAD"; empty ones if it has ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return [""] * (BORN + 1)


def transferred(pid: int) -> int:
    """Bytes that a process has read and written so far."""
    try:
        with open(f"/proc/{pid}/io") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
    except OSError:
        return 0


def siblings(pid: int) -> list[tuple[int, int]]:
    """(rank, process) of the processes that the parent of `pid` has started, as far as the launcher numbers them."""
    variable = next((name for name in RANK_VARIABLES if name in os.environ), "")
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        if variable and stat(entry)[PARENT] == stat(pid)[PARENT]:
            with ignoring(OSError), open(f"/proc/{entry}/environ", "rb") as file:        # it may end meanwhile
                values = dict(part.split(b"=", 1) for part in file.read().split(b"\0") if b"=" in part)
                found.append((int(values.get(variable.encode(), -1)), int(entry)))
    return found
