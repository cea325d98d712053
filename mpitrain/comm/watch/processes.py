"""What /proc says of the processes of this node. The watcher uses it too, which imports little."""

from __future__ import annotations

import os

from mpitrain.comm.watch.ignoring import ignoring

STOPPED = ("T", "t")                      # states of proc(5): by a signal, by a debugger
PARENT, BORN = 1, 19                      # fields of `stat`, of which the state is the first
JOB_VARIABLES = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID")       # alike in all ranks of a job, and no other
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


def siblings(pid: int, launcher: int) -> list[tuple[int, int]]:
    """(rank, process) of this process's job that `launcher` has started, as far as it numbers them.

    There are none where `pid` has got another parent: the launcher is gone, and what adopts ranks has other children, too.
    """
    variable = next((name for name in RANK_VARIABLES if name in os.environ), "")
    if not variable or launcher <= 1 or stat(pid)[PARENT] != str(launcher):
        return []
    found, job = list[tuple[int, int]](), [os.environ.get(name) for name in JOB_VARIABLES]
    for entry in filter(str.isdigit, os.listdir("/proc")):
        if stat(entry)[PARENT] == str(launcher):
            with ignoring(OSError, ValueError), open(f"/proc/{entry}/environ", "rb") as file:        # it may end meanwhile
                values = dict(part.split("=", 1) for part in os.fsdecode(file.read()).split("\0") if "=" in part)
                if variable in values and [values.get(name) for name in JOB_VARIABLES] == job:
                    found.append((int(values[variable]), int(entry)))
    return found
