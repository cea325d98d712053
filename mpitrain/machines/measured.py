"""What `bench fit` has measured, as plans use it: by the number of ranks of a host, and whether it was this very host.

A file of `bench fit` has tables by ranks (`by_ranks`, `contention`), because more ranks than cores cost more than any constant
says: they take turns, and a message waits for a turn. Between numbers that were measured, the next larger one holds; beyond the
largest, that one.
"""

from __future__ import annotations

import hashlib
import os
import platform
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

from mpitrain.machines.machine import MachineFile
from mpitrain.schedules.level_times import Level

CPUINFO = "/proc/cpuinfo"
CROWDED = 2.0                            # times what ranks alone would take; schedulers cost up to 1.4
KEYS = ("model name", "flags", "cache size", "CPU part", "Features")


def fingerprint() -> str:
    """A short name of this host's processor and of how many cores a process may use: where it is equal, times can be compared."""
    words = [platform.machine(), str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())]
    try:
        with open(CPUINFO) as file:
            first = file.read().split("\n\n")[0]
    except OSError:
        first = platform.processor()
    lines = dict(line.partition(":")[::2] for line in first.splitlines())
    words += [value.strip() for key, value in lines.items() if key.strip() in KEYS]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def is_here(machine: MachineFile) -> bool:
    """Whether the file was measured on a host like this one."""
    return machine.measured.get("fingerprint") == fingerprint()


@dataclass(frozen=True)
class MeasuredLevel(Level):
    """A level at which all-reduces of `measured` ranks have been timed: (bytes, seconds), from small to large; and seconds a byte
    of several at once (0: nobody has)."""

    measured: int = 0
    points: tuple[tuple[float, float], ...] = ()
    at_once: float = 0.0

    def all_reduce(self, n: int, nbytes: float) -> float | None:
        return on_curve(self.points, nbytes) if n == self.measured else None

    def stream(self, n: int, nbytes: float) -> float | None:
        return self.at_once * nbytes if n == self.measured and self.at_once else None


def on_curve(points: Sequence[Sequence[float]], nbytes: float) -> float:
    """Seconds on the line between the two (bytes, seconds) next to `nbytes`, in logarithms; in proportion beyond the largest."""
    after = bisect_left(points, nbytes, key=lambda point: point[0])
    if after == len(points):
        return points[-1][1] * nbytes / points[-1][0]
    if after == 0:
        return points[0][1]
    (left, before), (right, then) = points[after - 1], points[after]
    return float(before * (then / before) ** (log(nbytes / left) / log(right / left)))


def layer_seconds(machine: MachineFile, ranks: int, group: int, nbytes: float) -> float | None:
    """Seconds of a sum of a layer over `group` ranks of one host, where `ranks` are at work; None where nobody measured it."""
    table = machine.measured.get("by_ranks", {})
    points = table.get(str(ranks), {}).get("layers", {}).get(str(group))
    return on_curve(points, nbytes) if points else None


def measured_level(level: Level, costs: Mapping[str, Any], n: int) -> MeasuredLevel:
    """A level with the costs that n ranks of it were measured to have."""
    return MeasuredLevel(level.name, level.ranks, costs["alpha"], costs["beta"], costs["gamma"], level.sharing, n,
                         tuple((size, seconds) for size, seconds in costs["points"]), costs.get("at_once", 0.0))


def at_ranks(machine: MachineFile, ranks: int, *, by_messages: bool = False) -> MachineFile:
    """The machine as `ranks` ranks find it: each level, Python's seconds and the cores that ranks of a host have are those of so
    many ranks.

    `by_messages`: ranks of a node send each other messages instead of sharing memory. A machine that nobody measured is the same
    for any number.
    """
    table, between = machine.measured.get("by_ranks"), machine.measured.get("between")
    if not table:
        return machine
    inside, levels = min(ranks, machine.levels[0].ranks or ranks), list(machine.levels)
    if between is not None:
        levels[-1] = measured_level(levels[-1], between, machine.measured["nodes"])
    if inside > 1:
        key = nearest_count(inside, [int(n) for n in table if int(n) > 1])
        found = table[key]
        levels[0] = measured_level(levels[0], found["messages" if by_messages else "shared"], int(key))
        machine = replace(machine, collective_s=found["collective_s"], message_s=message_seconds(machine, levels[0].alpha))
    return replace(machine, levels=tuple(levels), cores=inside / turns(machine, inside))


def nearest_count(ranks: int, counts: Sequence[int]) -> str:
    """The key of the table for so many ranks: the next larger number, or the largest."""
    return str(min((n for n in counts if n >= ranks), default=max(counts)))


def message_seconds(machine: MachineFile, alpha: float) -> float:
    """The interpreter's seconds at each end of a message between stages: what a small one takes beyond the level's alpha."""
    points = machine.measured.get("by_ranks", {}).get("2", {}).get("stage_messages")
    return max(0.0, points[0][1] - alpha) / 2 if points else machine.message_s


def step_seconds(machine: MachineFile, ranks: int) -> float:
    """Seconds of a step of so many ranks that computes next to nothing: its loop, data and small collectives; 0 where unknown."""
    table: Mapping[str, Any] = machine.measured.get("by_ranks", {})
    if "between" in machine.measured and ranks > (machine.levels[0].ranks or ranks):
        return float(machine.measured["between"]["step_s"])
    return float(table[nearest_count(ranks, [int(n) for n in table])]["step_s"]) if table else 0.0


def slowdown(machine: MachineFile, ranks: int, kind: str) -> float:
    """How many times the processor time alone work takes where `ranks` ranks of a host are at it; `kind`: "products", "memory",
    "training". 1 where nobody measured. That ranks beyond the cores take `turns` comes on top."""
    table = machine.measured.get("contention")
    if not table:
        return 1.0
    return float(table[kind][table["ranks"].index(int(nearest_count(ranks, table["ranks"])))])


def turns(machine: MachineFile, ranks: int) -> float:
    """How many times its processor time work takes where `ranks` ranks of a host do as much each: by the number of cores, or as
    the host's scheduler was measured to let them take turns."""
    by_cores = max(1.0, ranks / machine.cores) if machine.cores else 1.0
    table = machine.measured.get("by_ranks", {})
    return max(by_cores, float(table[str(ranks)]["turns"])) if str(ranks) in table else by_cores


def beyond(machine: MachineFile, ranks: int) -> str:
    """In words, that so many ranks are more than were measured, and what they cost follows from fewer; "" where it does not."""
    table, between = machine.measured.get("by_ranks"), machine.measured.get("between")
    if not table:
        return ""
    inside, most = min(ranks, machine.levels[0].ranks or ranks), max(map(int, table))
    said = [f"fitted on {most} rank{'s' * (most > 1)} of a host, {inside} were never measured"] if inside > most else []
    hosts = -(-ranks // inside)
    if between is not None and hosts > machine.measured["nodes"]:
        said.append(f"fitted on {machine.measured['nodes']} hosts, {hosts} were never measured")
    return "; ".join(said)


def crowded(ranks: int, turns_taken: float, cores: float) -> str:
    """In words, that ranks had to wait for other processes' turns while they were measured; "" where they had the cores to
    themselves."""
    idle = max(1.0, ranks / cores)
    if turns_taken < CROWDED * idle:
        return ""
    return (f"{ranks} ranks took {turns_taken:.1f} times their processor time, {idle:.1f} times are expected: other processes "
            "were at work on this host, and plans by this file are as slow; measure again when it is idle")


def beside_others(machine: MachineFile) -> str:
    """The first `crowded` of the numbers of ranks that a file has."""
    cores, table = machine.measured.get("cores") or machine.cores, machine.measured.get("by_ranks", {})
    said = (crowded(int(n), found["turns"], cores) for n, found in table.items() if cores)
    return next(filter(None, said), "")
