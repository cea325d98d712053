"""Memory of a device's arrays, counted where CuPy's pools give it out and get it back.

A pool tells what is used now; a peak is between two questions, so a hook adds up what is taken and given back while somebody
counts (`with pool:`). The hook costs about a microsecond for each array, and nothing outside. Launches run later than the host's
program, but memory changes hands in the order of the program, so the numbers are those of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mpitrain.backend.memory import Usage
from mpitrain.backend.namespace import Device


class DevicePool:
    """`used` and `peak` of CuPy's pool and of those that `others` names, such as those of graphs; as `memory.Pool` tells them."""

    def __init__(self, device: Device, others: Callable[[], Iterable[Any]] = tuple):
        cuda = device.xp.cuda
        self._pool, self._others, self._used, self._peak = device.xp.get_default_memory_pool(), others, 0, 0
        self._hook: Any = type("Counting", (cuda.MemoryHook,), {
            "name": "mpitrain", "malloc_postprocess": self._taken, "free_postprocess": self._given_back})()

    def __enter__(self) -> DevicePool:
        """From now on arrays that this thread makes are added up."""
        self._look()
        self._hook.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.__exit__()

    def _taken(self, *, mem_size: int, mem_ptr: int, **_: int) -> None:
        if mem_ptr:                                           # 0: there was none
            self._used += mem_size
            self._peak = max(self._peak, self._used)

    def _given_back(self, *, mem_size: int, **_: int) -> None:
        self._used -= mem_size

    def _look(self) -> None:
        """Takes what is used from the pools, whose arrays other threads free as well."""
        self._used = sum(pool.used_bytes() for pool in (self._pool, *self._others()))
        self._peak = max(self._peak, self._used)

    def recent_peak(self) -> int:
        """The most bytes used since the last call."""
        self._look()
        peak, self._peak = self._peak, self._used
        return peak

    def usage(self) -> Usage:
        """What the pools hold; `peak` since `recent_peak`, and their number of requests to the device is not known: 0."""
        self._look()
        system = sum(pool.total_bytes() for pool in (self._pool, *self._others()))
        return Usage(self._used, self._peak, system - self._used, system, 0)

    def trim(self) -> int:
        """Gives back to the device all that is free; how many bytes that was."""
        before = self._pool.total_bytes()
        self._pool.free_all_blocks()
        return int(before - self._pool.total_bytes())
