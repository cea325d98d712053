"""Joules that nobody has counted: what a host would use that takes some watts idle and some more with all cores at work.

    watts = idle + (busy - idle) * CPU seconds of the job's processes / (cores * seconds)

It is CodeCarbon's and others' way where no counter can be read. It knows nothing of clocks, memory or vector units, and what it
gives is called estimated wherever it is told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from mpitrain.energy.zones import Lost


class Model:
    """A host's joules, estimated from the CPU time of the processes `pids`, since it was made.

    `idle` and `busy` are watts of the whole host, `cpu_seconds(pid)` what a process has used of its cores.
    """

    kind, measured, lag_s = "model", False, 0.0

    def __init__(self, idle: float, busy: float, pids: Sequence[int], *, cores: int | None = None,
                 clock: Callable[[], float] = time.monotonic, cpu_seconds: Callable[[int], float] | None = None):
        self.idle, self.busy, self.pids = idle, busy, list(pids)
        self.cores = cores or os.cpu_count() or 1
        self._clock, self._cpu_seconds = clock, cpu_seconds or process_seconds
        self._began, self._cpu = clock(), self._used()
        self._last = 0.0

    def joules(self) -> float:
        """Since it was made. Lost where a process cannot be asked."""
        seconds = self._clock() - self._began
        share = min(1.0, (self._used() - self._cpu) / max(self.cores * seconds, 1e-9))
        self._last = max(self._last, seconds * (self.idle + (self.busy - self.idle) * share))     # no counter runs back
        return self._last

    def parts(self) -> dict[str, float]:
        return {f"{words(self.idle, self.busy)}": self._last}

    def close(self) -> None:
        """There is nothing to close."""

    def _used(self) -> float:
        try:
            return sum(map(self._cpu_seconds, self.pids))
        except OSError as error:
            raise Lost(f"the CPU time of a process of this host cannot be read: {error.strerror}") from None


def words(idle: float, busy: float) -> str:
    """What stands beside each number that comes of this."""
    return f"estimated from {idle:g} W idle, {busy:g} W busy"


def process_seconds(pid: int) -> float:
    """CPU seconds of all threads of a process of this host so far. OSError where the system does not tell."""
    if pid == os.getpid():
        return time.process_time()
    return time.clock_gettime((~pid << 3) | 2)        # Linux's clock of a process (clock_getcpuclockid): CPUCLOCK_SCHED is 2
