"""Memory that the ranks of one node share, taken so that touching it can never kill the process.

Shared memory lives in a file system (/dev/shm) that is often small in containers: 64 MiB by Docker's default. A page beyond it is
not refused when the memory is made but when it is first touched, by SIGBUS. So all ranks compare what is asked with what is free
before anything is made, and then have the kernel fill in every page: it answers with an error number instead of the signal.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.comm.messages.buffers import LINE, Host, assert_usable

if TYPE_CHECKING:
    from mpi4py import MPI

FOLDER_SETTING = "OMPI_MCA_osc_sm_backing_directory"
POPULATE_WRITE = 23                                           # madvise's advice, since Linux 5.14
MARGIN = 1 << 20                                              # MPI's own part of the file, and rounding to pages, fit in it


def folder() -> str:
    """The folder that Open MPI puts the file behind a shared window in."""
    return os.environ.get(FOLDER_SETTING, "/dev/shm")


def free_bytes() -> int:
    """The bytes of `folder` that are free for this user."""
    status = os.statvfs(folder())
    return status.f_bavail * status.f_frsize


class Window:
    """One block of memory mapped by all ranks of `comm`, zero at first; `bytes` is this process's view of it. Use `make`."""

    def __init__(self, window: MPI.Win, block: Host):
        self._window, self.bytes = window, block

    @classmethod
    def make(cls, comm: MPI.Intracomm, nbytes: int, parts: int = 1, *,
             free: Callable[[], int] = free_bytes) -> tuple[Window | None, str]:
        """(window, "") or (None, why not): the same on all ranks. Collective.

        The block has `parts` parts of `nbytes`, each rounded up to pages; rank i is the first to touch part i % parts, since a
        page's memory comes from the NUMA node of the CPU that touches it first.
        """
        from mpi4py import MPI
        page = mmap.PAGESIZE
        part = -(-nbytes // page) * page
        asked = part * parts + MARGIN
        # This precedes the call: where its file does not fit, Open MPI 5 fails on one rank and leaves the others waiting for it.
        # Ranks may see the file system differently, hence the minimum. Room that others take before MPI's call is not caught.
        least = comm.allreduce(_number(free), op=MPI.MIN)
        if least < 0:
            return None, _unusable(-least)
        if least < asked:
            return None, f"{folder()} has {least >> 20} MiB free where {-(-asked >> 20)} MiB are needed; {_remedy()}"
        window: Any = None
        try:
            window = MPI.Win.Allocate_shared(part * parts + page if comm.rank == 0 else 0, 1, comm=comm)
        except MPI.Exception as error:
            reason = f"MPI.Win.Allocate_shared: {error}"
        if not comm.allreduce(window is not None, op=MPI.LAND):
            if window is not None:
                window.Free()
                reason = "MPI.Win.Allocate_shared failed on another rank"
            return None, reason
        block: Host = np.frombuffer(window.Shared_query(0)[0], np.uint8)
        ahead = -block.ctypes.data % page                     # every rank finds the same: mappings begin on pages
        block = block[ahead:ahead + part * parts]
        mine = comm.rank % parts
        failed = _populate(block[mine * part:(mine + 1) * part])
        failed = comm.allreduce(failed, op=MPI.MAX) or comm.allreduce(_populate(block), op=MPI.MAX)
        if failed:
            window.Free()
            return None, f"{folder()}: filling {asked >> 20} MiB failed: {os.strerror(failed)}"
        return cls(window, block), ""

    def close(self) -> None:
        """Give the memory back; collective. No view of it may be used afterwards."""
        self.bytes = np.empty(0, np.uint8)
        self._window.Free()


def _remedy() -> str:
    if folder() != "/dev/shm":
        return f"free some of it, or let {FOLDER_SETTING} name a folder with more"
    return 'free some of it, or enlarge it: "--shm-size" of a container, "mount -o remount,size=..." as root'


def _unusable(number: int) -> str:
    """The reason why the folder is unusable, from the error number of asking for its free bytes."""
    if number == errno.ENOENT:
        return f"there is no folder {folder()}; let {FOLDER_SETTING} name one that is there"
    return f"{folder()}: {os.strerror(number)}; let {FOLDER_SETTING} name another folder"


def _number(free: Callable[[], int]) -> int:
    """The free bytes, or the negative error number of asking: one number, which ranks can compare."""
    try:
        return free()
    except OSError as error:
        return -(error.errno or errno.EIO)


def _populate(block: Host) -> int:
    """Have the kernel fill in every page; 0, or the error number. Linux before 5.14 cannot: the comparison has to do."""
    if not block.size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(block.ctypes.data), ctypes.c_size_t(block.size), POPULATE_WRITE) == 0:
        return 0
    number = ctypes.get_errno()
    return 0 if number in UNKNOWN_ADVICE else number


UNKNOWN_ADVICE: Any = frozenset({errno.EINVAL, errno.ENOSYS})


_Memory = ctypes.c_char * 1
_memory_at: Any
_memory_at, _number_of = _Memory.from_buffer, ctypes.addressof       # they take 1 us; `array.ctypes.data` takes three times that


def address_of(array: Any) -> int:
    """The address of a host array; 0 for an empty one or one of a GPU. AssertionError for gaps and for read-only memory."""
    if type(array) is not np.ndarray or not array.size:
        return 0
    try:
        return int(_number_of(_memory_at(array)))
    except (TypeError, ValueError):
        assert_usable(array)
        raise


def inside(part: Host, address: int, nbytes: int) -> bool:
    begin = part.ctypes.data
    return begin <= address and address + nbytes <= begin + part.nbytes


def slice_between_lines(address: int, itemsize: int, count: int, n: int, rank: int) -> tuple[int, int]:
    """Slice `rank` of n almost equal ones of an array, cut between cache lines."""
    per_line = LINE // itemsize
    head = (-address % LINE) // itemsize                      # elements before the first whole line

    def cut(index: int) -> int:
        if index in (0, n):
            return count if index else 0
        middle = index * count // n
        return min(count, max(0, middle - (middle - head) % per_line))
    return cut(rank), cut(rank + 1)
