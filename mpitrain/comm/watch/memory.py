"""Did the system end a rank for want of memory? The kernel counts the processes that it kills for it.

    cgroup v2    /sys/fs/cgroup/GROUP/memory.events                memory.max               as of each group above it
    cgroup v1    /sys/fs/cgroup/memory/GROUP/memory.oom_control    memory.limit_in_bytes
    neither      /proc/vmstat                                      MemTotal of /proc/meminfo

This file is for the watcher, which imports little and runs on the standard library alone.
"""

from __future__ import annotations

import os
import time

from mpitrain.comm.watch.ignoring import ignoring

ROOT = "/sys/fs/cgroup"
FILES = {"": ("memory.events", "memory.max"), "memory": ("memory.oom_control", "memory.limit_in_bytes")}      # by the controller
HOST = "/proc/vmstat"
NO_LIMIT = 1 << 60                        # cgroup v1 has no word for it, but a number near 2**63
RECENT_S = 10.0                           # a large process takes seconds to end after it was counted
PAGE = os.sysconf("SC_PAGESIZE")


class Memory:
    """The memory of a process, and its control group: they are looked at while it lives, since both may go with it."""

    def __init__(self, pid: int):
        self.pid, self.resident, self.size = pid, 0, 0
        self.addresses = addresses_of(pid)
        self.group, self.counter, self.limit = group_of(pid)
        self.counts, self.rose = [kills(self.counter), kills(HOST)], float("-inf")

    def look(self) -> None:
        self._count()
        with ignoring(OSError, ValueError, IndexError), open(f"/proc/{self.pid}/statm") as file:
            size, resident = [int(number) * PAGE for number in file.read().split()[:2]]
            self.resident, self.size = resident or self.resident, max(size, self.size)

    def wanted(self) -> bool:
        """Whether the system has just killed a process of this group for want of memory."""
        self._count()
        return time.monotonic() - self.rose < RECENT_S

    def _count(self) -> None:
        counts = [kills(self.counter), kills(HOST)]
        own = counts[0] if counts[0] is not None else counts[1]           # a group may be removed with its last process
        before = self.counts[0] if counts[0] is not None else self.counts[1]
        if own is not None and before is not None and own > before:
            self.rose = time.monotonic()
        self.counts = counts

    def words(self) -> str:
        """The end of such a process, what it had when it was last looked at, the limit, and the cure."""
        return (f"the system killed this rank, probably out of memory: it had {self.resident >> 20} MiB or more, and "
                f"{self.group} may have {self.limit >> 20} MiB in all; ask for more memory, start fewer ranks on a node, or set "
                "train.micro_batches higher, train.recompute = true, or comm.sharding")

    def narrow(self) -> str:
        """What a limit on its addresses says of the end of a process that used most of them; "" where there is none."""
        if 2 * self.size < self.addresses:
            return ""
        return f"; it may have {self.addresses >> 20} MiB (ulimit -v), which is little: raise that limit"


def addresses_of(pid: int) -> int:
    """The limit on the address space of a process, in bytes; NO_LIMIT where there is none, or none is known."""
    with ignoring(OSError, ValueError, IndexError), open(f"/proc/{pid}/limits") as file:
        return [int(line.split()[3]) for line in file if line.startswith("Max address space")][0]       # or "unlimited"
    return NO_LIMIT


def group_of(pid: int) -> tuple[str, str, int]:
    """The control group that accounts for a process, in words, the file that counts, and the limit in bytes."""
    for kind, name in groups(pid):
        events, limit = FILES[kind]
        for path in (f"{ROOT}/{kind}/{name}", f"{ROOT}/{kind}"):          # in a container its own group may be the root
            if os.path.exists(f"{path}/{events}"):
                path = os.path.normpath(path)
                limits = [limit_in(f"{above}/{limit}") for above in parents(path)]
                return f"its control group {path}", f"{path}/{events}", min([*limits, total()])
    return "this host", HOST, total()


def groups(pid: int) -> list[tuple[str, str]]:
    """(controller, or "" for cgroup v2, and path) of the groups of a process that may account for memory."""
    with ignoring(OSError), open(f"/proc/{pid}/cgroup") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
        return [(kind, path.strip("/")) for _, kind, path in lines if kind in FILES]
    return []


def parents(path: str) -> list[str]:
    found = [path]
    while len(found[-1]) > len(ROOT):
        found.append(os.path.dirname(found[-1]))
    return found


def limit_in(file_name: str) -> int:
    with ignoring(OSError, ValueError), open(file_name) as file:
        return min(int(file.read()), NO_LIMIT)               # cgroup v2 writes "max" where there is none
    return NO_LIMIT


def total() -> int:
    """The memory of the host, in bytes."""
    return PAGE * os.sysconf("SC_PHYS_PAGES")


def kills(file_name: str) -> int | None:
    """How many processes were killed for want of memory; None where nobody counts."""
    with ignoring(OSError, ValueError), open(file_name) as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    return None
