"""What the processor is, and how much of it this process may use, as Linux tells; elsewhere, what Python knows."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def cpu_info() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; nothing where there is no such file."""
    lines = (line.partition(":") for line in text_of(Path("/proc/cpuinfo")).split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def cpu_flags() -> frozenset[str]:
    """The instruction sets of this CPU, by Linux's names."""
    info = cpu_info()
    return frozenset(info.get("flags", info.get("Features", "")).split())


def bound_cores(root: Path = Path("/")) -> tuple[int, ...]:
    """The cores this process may run on; of the hardware threads of a core, the lowest number stands for all.

    Products fill the arithmetic units of a core with one thread.
    """
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))
    return tuple(sorted({_core(root, number) for number in os.sched_getaffinity(0)}))


def _core(root: Path, number: int) -> int:
    siblings = text_of(root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
    first = siblings.replace("-", ",").partition(",")[0]
    return int(first) if first.isdigit() else number


def cpu_limit(root: Path = Path("/")) -> float:
    """The CPU time that the control groups of this process grant it and its neighbours in them, in cores; 0: no limit.

    The nearest limit counts, and that of every group above it.
    """
    limits = []
    for folder in control_groups("cpu", root):
        limits += [_quota(*(text_of(folder / "cpu.max").split() + ["", ""])[:2]),
                   _quota(text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us"))]
    return min((limit for limit in limits if limit), default=0.0)


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """The folders of this process's control groups with a controller ("cpu", "memory") and of those above them, in version 2
    and 1."""
    found = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _upwards(root / "sys/fs/cgroup", path)
        elif controller in controllers.split(","):
            found += _upwards(root / "sys/fs/cgroup" / controller, path)
    return found


def _upwards(base: Path, path: str) -> list[Path]:
    """The group's folder and those above it, as far as they can be seen from here."""
    folder = base / path.lstrip("/")
    return [folder, *(above for above in folder.parents if above == base or base in above.parents)]


def _quota(quota: str, period: str) -> float:
    """Microseconds in each period as cores; "max" and -1 mean no limit."""
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else 0.0


def text_of(path: Path) -> str:
    """The text of a small file of the system; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""                            # This is not Linux, or a container without /sys.
