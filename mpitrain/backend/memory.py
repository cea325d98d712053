"""Keeping memory instead of handing it back: the first touch of a page costs more than the arithmetic done on it.

glibc gives every block above a threshold a mapping of its own and returns it to the system when it is freed, so each array of
each step faults its pages in again, at 1 to 4 us per 4 KiB on a virtual machine (attention at nanoGPT's CPU shapes, forward
and backward: 5.9 ms with 750 faults, 2.8 ms without).

So NumPy's arrays come from a pool of our own (`native/memory.c`), installed as NumPy's memory handler (NEP 49). NumPy looks the
handler up in the running context, and each thread has a context of its own: one that makes arrays calls `use_pool` first. An
array knows its handler, and may be freed by any thread. Memory that is not of arrays, and without a C compiler all of it, stays
with malloc, which is told to keep what is freed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mpitrain.backend.cpu import control_groups, text_of
from mpitrain.backend.native import load

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3           # malloc.h
LARGEST = 32 << 20                                    # glibc ignores a mmap threshold above this
KEEP = (1 << 31) - 1                                  # The heap is trimmed when so many bytes are free at its top.
SET_HANDLER, DEFAULT_HANDLER = 304, 306               # NumPy's table of C functions has these places: numpy/__multiarray_api.h.


class Usage(NamedTuple):
    """What the pool holds, in bytes; a block is the memory of an array, with what its size was rounded up by."""

    used: int                                         # bytes in blocks of arrays
    peak: int                                         # The largest `used` so far.
    cached: int                                       # bytes that are free and kept for the next arrays
    system: int                                       # bytes taken from the system: used and cached
    arenas: int                                       # the number of requests to the system


class Pool:
    """The pool of this process, from `pool()`. Its memory serves until the process ends, whatever becomes of this object."""

    def __init__(self, library: ctypes.CDLL):
        new = _python("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        pointer = _python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
        name_of = _python("PyCapsule_GetName", ctypes.c_void_p, ctypes.py_object)
        functions = importlib.import_module("numpy._core._multiarray_umath")._ARRAY_API
        table = ctypes.cast(pointer(functions, None), ctypes.POINTER(ctypes.c_void_p))
        numpys = ctypes.cast(table[DEFAULT_HANDLER], ctypes.POINTER(ctypes.py_object))[0]
        name = name_of(numpys)                        # The capsule keeps a pointer to its name, so the name must stay in place.
        library.memory_handler.argtypes, library.memory_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
        library.memory_set_cap.argtypes, library.memory_set_cap.restype = [ctypes.c_int64], None
        for function in (library.memory_trim, library.memory_recent_peak):
            function.argtypes, function.restype = [], ctypes.c_int64
        self._library = library
        self._capsule = new(library.memory_handler(pointer(numpys, name)), name, None)
        self._set = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[SET_HANDLER])

    def use(self) -> None:
        """From now on the arrays of this thread (of its running context) come from the pool."""
        self._set(self._capsule)

    def limit(self, cached: float | None) -> None:
        """Keeps at most so many bytes that are free, or (None) as many as there are; the rest goes back to the system."""
        self._library.memory_set_cap(-1 if cached is None else int(min(cached, 1 << 62)))

    def trim(self) -> int:
        """Gives back all that is free; how many bytes that was."""
        return int(self._library.memory_trim())

    def recent_peak(self) -> int:
        """The most bytes of blocks since the last call, whoever made it; `Usage.peak` is that since the beginning."""
        return int(self._library.memory_recent_peak())

    def usage(self) -> Usage:
        numbers = (ctypes.c_int64 * len(Usage._fields))()
        self._library.memory_usage(numbers)
        return Usage(*numbers)


class Counter(Protocol):
    """A `Pool`, or a device's, as far as its arrays are counted."""

    def recent_peak(self) -> int: ...

    def usage(self) -> Usage: ...


class Swing:
    """How many more bytes of arrays there are within steps than before or after them: `most`, None where nobody counts them.

    `system` is what they have taken from the system in steps and before the first one: not what ran in between, an evaluation
    or a checkpoint, and has left free.
    """

    def __init__(self, pool: Counter | None = None):
        self.pool, self.most, self._before = pool, None if pool is None else 0, 0
        self.system: int | None = None
        self._system_before = 0

    def begin(self, passing: int = 0) -> None:
        """A step begins: peaks of what came before are none of it, nor are bytes of the last one that are `passing`."""
        if self.pool is not None:
            self.pool.recent_peak()
            usage = self.pool.usage()
            self._before, self._system_before = usage.used - passing, usage.system
            if self.system is None:
                self.system = usage.system

    def end(self, passing: int = 0) -> None:
        """It has ended; so many bytes that are there still will go with the next one."""
        if self.pool is not None and self.most is not None and self.system is not None:
            peak, usage = self.pool.recent_peak(), self.pool.usage()
            self.most = max(self.most, peak - max(self._before, usage.used - passing))
            self.system += usage.system - self._system_before


def _python(name: str, result: Any, *arguments: Any) -> Any:
    """A function of Python's own C interface, with a prototype that is not shared, as that on ctypes.pythonapi is."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


@cache
def pool() -> Pool | None:
    """The pool, which nobody uses yet; None without a C compiler."""
    library = load("memory")
    return None if library is None else Pool(library)


_used: list[Pool] = []                                # The process uses one pool at most.


def pool_in_use() -> Pool | None:
    """The pool, where `keep_freed_memory` was called and there is one."""
    return _used[0] if _used else None


def keep_freed_memory(cached: float | None = None) -> bool:
    """Arrays of this thread come from the pool, which keeps at most `cached` bytes that are free; malloc keeps all it has.

    For the whole process, so a program's own decision. False where there is neither a C compiler nor glibc.
    """
    found = pool()
    if found is not None:
        found.limit(cached)
        _used[:] = [found]
    use_pool()
    return _malloc_keeps() or found is not None


def use_pool() -> None:
    """The first call of a thread that makes arrays: they come from the pool too, where this process keeps freed memory."""
    for found in _used:
        found.use()


def _malloc_keeps() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, KEEP))


def page_faults() -> int:
    """How often this process has touched a page for the first time so far; a steady training step adds next to nothing."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident(peak: bool = False) -> int:
    """Bytes of memory of this process, of all kinds, shared with other processes or not: now, or the most there were.

    Not getrusage's maximum where there is a choice: a process inherits that from the one which started it.
    """
    wanted = b"VmHWM:" if peak else b"VmRSS:"
    try:
        with open("/proc/self/status", "rb") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(wanted))
    except (OSError, StopIteration):
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else largest << 10


def available(root: Path = Path("/")) -> int:
    """Bytes that this process can still take without making the system swap, or a control group of its own end it.

    What the system would take back from its cache of files counts as available. A large number where nobody says.
    """
    numbers = _numbers(root / "proc/meminfo")
    rooms = [numbers["MemAvailable"] << 10] if "MemAvailable" in numbers else []
    for folder in control_groups("memory", root):
        limit, used = ((text_of(folder / new) or text_of(folder / old)) for new, old in (
            ("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes")))
        if limit.isdigit() and used.isdigit():                # "max" means no limit
            rooms.append(int(limit) - int(used) + _numbers(folder / "memory.stat").get("inactive_file", 0))
    return min(rooms, default=1 << 62)


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number on each line."""
    words = [line.replace(":", " ").split() for line in text_of(path).splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def forget_peak() -> bool:
    """Hands freed memory back to the system, then counts `resident(peak=True)` anew; False where the system does not let us."""
    gc.collect()
    for found in _used:
        found.trim()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")     # proc(5): resets the peak, since Linux 4.0
    except OSError:
        return False
    return True
