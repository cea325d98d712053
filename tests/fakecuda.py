"""``xp.cuda`` of the stand-in: streams, events, pinned memory and graphs, all in the order of the program.

Work on any stream is done at once; a missing wait between two streams is found by `device_races.watched()`. Waits of the host are
counted. With `lagging(n)` an asynchronous copy to the host happens when an event of its stream has been asked n times: who reads
early reads old values.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import device_graphs
import device_races
import numpy as np
from device_counts import note
from fakepool import Block, Blocks


def is_available() -> bool:
    return True


class Device:
    def __init__(self, number: int = 0):
        self.id = number

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        _wait("device")

    @property
    def compute_capability(self) -> str:
        return "90"


class runtime:                                    # noqa: N801  (CuPy's name)
    class CUDARuntimeError(RuntimeError):
        """An error of the driver."""

    @staticmethod
    def getDeviceCount() -> int:                  # noqa: N802
        return 1

    @staticmethod
    def deviceGetPCIBusId(number: int) -> str:    # noqa: N802
        """A GPU for each rank, or one for all: $MPITRAIN_FAKE_BUS."""
        from mpi4py import MPI
        return os.environ.get("MPITRAIN_FAKE_BUS", f"0000:{MPI.COMM_WORLD.rank:02x}:00.0")

    @staticmethod
    def ipcGetMemHandle(pointer: int) -> bytes:   # noqa: N802
        """Of an allocation's first byte, 64 bytes: who owns the file that its memory is of, and which of the files it is."""
        if pointer not in _allocations:
            raise RuntimeError("cudaErrorInvalidValue: invalid argument")
        return f"{os.getpid()} {_allocations[pointer]}".encode().ljust(64, b"\0")

    @staticmethod
    def ipcOpenMemHandle(handle: bytes, flags: int = 1) -> int:       # noqa: N802
        owner, file = handle.rstrip(b"\0").decode().split()
        if int(owner) == os.getpid() or flags != 1:
            raise RuntimeError("cudaErrorDeviceUninitialized: invalid device context")
        memory = _mapped(os.open(f"/proc/{owner}/fd/{file}", os.O_RDWR))
        _opened[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    @staticmethod
    def ipcCloseMemHandle(pointer: int) -> None:  # noqa: N802
        del _opened[pointer]


class nccl:                                       # noqa: N801
    """NCCL over MPI, on addresses of the stand-in's memory. Identities are 128 signed bytes, as CuPy has them."""

    available = True

    @staticmethod
    def get_unique_id() -> tuple[int, ...]:
        return tuple((37 * i + 200) % 256 - 128 for i in range(128))

    class NcclCommunicator:
        def __init__(self, n: int, identity: tuple[int, ...], rank: int):
            from mpi4py import MPI
            assert identity == nccl.get_unique_id() and (n, rank) == (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank)
            self._comm = MPI.COMM_WORLD.Dup()

        def allReduce(self, source: int, target: int, count: int, kind: int, operation: int, stream: int) -> None:  # noqa: N802
            from mpi4py import MPI
            number = {7: ctypes.c_float, 8: ctypes.c_double}[kind]
            assert source == target and operation == 0 and stream
            self._comm.Allreduce(MPI.IN_PLACE, np.ctypeslib.as_array((number * count).from_address(target)))


def _wait(what: str) -> None:
    device_graphs.forbidden(f"to wait for the {what}")
    note(sync=what)


_lag = 0
_late: list[tuple[Stream, Callable[[], Any]]] = []            # copies to the host that have not happened


@contextmanager
def lagging(n: int) -> Iterator[None]:
    global _lag
    _lag = n
    try:
        yield
    finally:
        _lag = 0


def copy_later(work: Callable[[], Any], stream: Stream | None = None) -> None:
    if _lag:
        _late.append((stream or get_current_stream(), work))
    else:
        device_graphs.in_place(work)


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False):
        self.seconds: float | None = None
        self.timed = not disable_timing
        self._works: list[tuple[Stream, Callable[[], Any]]] = []
        self._asked = 0
        self.clock: device_races.Clock = {}

    def record(self, stream: Any = None) -> None:
        def now() -> None:
            self.seconds = time.perf_counter()
        stream = stream or get_current_stream()
        self._works, self._asked = [late for late in _late if late[0] is stream], 0
        self.clock = device_races.recorded(stream)
        device_graphs.in_place(now)

    def _reach(self) -> None:
        for late in self._works:
            if late in _late:
                _late.remove(late)
                late[1]()
        self._works = []

    @property
    def done(self) -> bool:
        self._asked += 1
        if self._works and self._asked <= _lag:
            return False
        self._reach()
        device_races.host_waits(self.clock)
        return True

    def synchronize(self) -> None:
        _wait("event")
        self._reach()
        device_races.host_waits(self.clock)


def get_elapsed_time(first: Event, second: Event) -> float:
    """Milliseconds."""
    assert first.timed and second.timed, "cudaErrorInvalidResourceHandle: an event was made without timing"
    assert first.seconds is not None and second.seconds is not None, "an event was not recorded"
    return 1e3 * (second.seconds - first.seconds)


class Stream:
    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False):
        self.ptr = id(self)

    def __enter__(self) -> Stream:
        _streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _streams.pop()

    def synchronize(self) -> None:
        _wait("stream")
        self.record()._reach()
        device_races.host_waits(device_races.recorded(self))

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event._reach()                             # What the stream is asked for next is done at once.
        device_races.waits(self, event.clock)

    @property
    def done(self) -> bool:
        return True

    def begin_capture(self, mode: Any = None) -> None:
        device_graphs.begin()

    def end_capture(self) -> device_graphs.Graph:
        return device_graphs.end()

    def is_capturing(self) -> bool:
        return device_graphs.capturing()


_streams = [Stream(null=True)]
Stream.null = _streams[0]                         # type: ignore[attr-defined]


def get_current_stream() -> Stream:
    return _streams[-1]


class PinnedMemoryPool:
    def malloc(self, size: int) -> Any:
        return np.empty(size, np.uint8)


pinned = PinnedMemoryPool()
_allocate_pinned: Callable[[int], Any] = pinned.malloc


def set_pinned_memory_allocator(allocator: Callable[[int], Any] = pinned.malloc) -> None:
    global _allocate_pinned
    _allocate_pinned = allocator


def alloc_pinned_memory(size: int) -> Any:
    return _allocate_pinned(size)


class MemoryHook:
    """Told of memory that this thread's arrays take and give back, between `__enter__` and `__exit__`."""

    name = "MemoryHook"

    def __enter__(self) -> MemoryHook:
        assert self.name not in _hooks, "CuPy has one hook of a name at a time"
        _hooks[self.name] = self
        return self

    def __exit__(self, *_: object) -> None:
        del _hooks[self.name]

    def malloc_postprocess(self, **about: int) -> None:
        pass

    def free_postprocess(self, **about: int) -> None:
        pass


_hooks: dict[str, MemoryHook] = {}


class Memory:
    """Of the driver. A device of LIMIT bytes has no more for one that is larger."""

    LIMIT = math.inf

    def __init__(self, size: int):
        if size > Memory.LIMIT:
            raise runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.size = size


def MemoryPointer(memory: Memory, offset: int) -> Memory:              # noqa: N802  (CuPy's name)
    return memory


class MemoryPool:
    """Counts the memory of arrays, where CuPy's pool would have it, while somebody has it; views take none."""

    def __init__(self, allocator: Callable[[int], Any] | None = None) -> None:
        self.allocator = allocator or Memory
        self.used = self.peak = self.given_back = 0
        self.blocks = Blocks()
        self.there: set[int] = set()                  # ids of the memory that is counted

    def used_bytes(self) -> int:
        return self.used

    def total_bytes(self) -> int:
        return self.blocks.taken

    def free_all_blocks(self) -> None:
        self.given_back += 1
        self.blocks.trim()

    def malloc(self, size: int) -> None:
        pass

    def hold(self, memory: np.ndarray, owner: Any) -> None:
        """Counts `memory`, which is no view, while there is its `owner`: graphs may read it then still, as on a GPU."""
        key = id(memory)
        if not memory.nbytes or any(key in pool.there for pool in _pools):
            return
        before, block = self.blocks.taken, self.blocks.take(memory.nbytes)
        if self.blocks.taken > before:
            self._take(block.size)
        self.there.add(key)
        self.used += block.size
        self.peak = max(self.peak, self.used)
        weakref.finalize(owner, self._gone, key, block).atexit = False
        for hook in [*_hooks.values()]:
            hook.malloc_postprocess(device_id=0, size=memory.nbytes, mem_size=block.size, mem_ptr=memory.ctypes.data, pmem_id=key)

    def _take(self, size: int) -> None:
        """From the driver, as CuPy's pool does: an error of the driver has it give back what is free, and ask again."""
        try:
            self.allocator(size)
        except runtime.CUDARuntimeError:
            self.free_all_blocks()
            self.allocator(size)

    def _gone(self, key: int, block: Block) -> None:
        self.there.discard(key)
        size = block.size
        self.used -= size
        self.blocks.give_back(block)
        for hook in [*_hooks.values()]:
            hook.free_postprocess(device_id=0, mem_size=size, mem_ptr=0, pmem_id=key)


_pools: weakref.WeakSet[MemoryPool] = weakref.WeakSet()


def pool_here() -> MemoryPool:
    """The pool that arrays come from now."""
    return _allocators[-1]


_allocations: dict[int, int] = {}                 # address: file, of memory that other processes may open
_opened: dict[int, np.ndarray[Any, Any]] = {}     # address: memory of other processes
_own_allocations = False


@contextmanager
def using_allocator(allocator: Any = None) -> Iterator[None]:
    """Without an allocator each array is an allocation of its own, as by cudaMalloc, in memory of a file without a name."""
    global _own_allocations
    before, _own_allocations = _own_allocations, allocator is None
    if allocator is not None:
        _allocators.append(allocator.__self__)
        _pools.add(allocator.__self__)
    try:
        yield
    finally:
        _own_allocations = before
        if allocator is not None:
            _allocators.pop()


def memory(shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
    if not _own_allocations:
        return np.empty(shape, dtype)
    file = os.memfd_create("allocation")
    os.ftruncate(file, int(np.prod(shape)) * np.dtype(dtype).itemsize)
    whole = _mapped(file)
    _allocations[whole.ctypes.data] = file
    return np.ndarray(shape, dtype, buffer=whole.base)


def _mapped(file: int) -> np.ndarray[Any, Any]:
    mapped = mmap.mmap(file, os.fstat(file).st_size)
    return np.ndarray(len(mapped), np.uint8, buffer=mapped)


default_pool = MemoryPool()
_pools.add(default_pool)
_allocators = [default_pool]
