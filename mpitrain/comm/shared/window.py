"""Memory that the ranks of one node share, taken so that touching it kills no process, and one rank's failure stops no other.

Shared memory lives in a file system (/dev/shm) that is often small in containers: 64 MiB by Docker's default. A page beyond it is
not refused when the memory is made but when it is first touched, by SIGBUS. So all ranks compare what is asked with what is free
before anything is made, and then have the kernel allocate every page: it answers with an error number instead of the signal.

The file is ours and not that of an MPI window. Where one rank may not make or map its memory (`ulimit -f`, `ulimit -v`, a file
system that others fill), MPI's call fails on this rank and leaves the others in it for ever. Here each step is a call to the
operating system, after which the ranks compare their results:

    rank 0 makes a file  ->  all map it, and its name goes  ->  each rank allocates its parts  ->  all fill in their page tables

The file has no pages until its name has gone, so a job that is killed leaves at most an empty name behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.comm.messages.buffers import LINE, Host, assert_usable

if TYPE_CHECKING:
    from mpi4py import MPI

FOLDER_SETTING = "OMPI_MCA_osc_sm_backing_directory"         # Open MPI's own name for it, which sites know
PREFIX = "mpitrain-shared-"
POPULATE_WRITE = 23                                           # madvise's advice, since Linux 5.14
MARGIN = 1 << 20                                              # bytes left for MPI, which makes queues of messages there later
TEXT = 1024                                                   # bytes of a reason or a path that ranks tell each other
MIB = 1 << 20


def folder() -> str:
    """The folder for shared memory."""
    return os.environ.get(FOLDER_SETTING, "/dev/shm")


def free_bytes() -> int:
    """The bytes of `folder` that are free for this user."""
    status = os.statvfs(folder())
    return status.f_bavail * status.f_frsize


class Window:
    """One block of memory mapped by all ranks of `comm`, zero at first; `bytes` is this process's view of it. Use `make`."""

    def __init__(self, memory: mmap.mmap):
        self.bytes: Host = np.frombuffer(memory, np.uint8)    # the mapping ends with its last view

    @classmethod
    def make(cls, comm: MPI.Intracomm, nbytes: int, parts: int = 1, *,
             free: Callable[[], int] = free_bytes) -> tuple[Window | None, str]:
        """(window, "") or (None, why not): the same on all ranks. Collective.

        The block has `parts` parts of `nbytes`, each rounded up to pages; rank i is the first to touch part i % parts, since a
        page's memory comes from the NUMA node of the CPU that touches it first.
        """
        page = mmap.PAGESIZE
        part = -(-nbytes // page) * page
        size = max(part * parts, page)
        # Ranks may see the file system differently, hence the minimum.
        least = _least(comm, _number(free))
        if least < 0:
            return None, _unusable(-least)
        if least < size + MARGIN:
            return None, f"{folder()} has {least >> 20} MiB free where {-(-(size + MARGIN) >> 20)} MiB are needed; {_remedy()}"
        path, why = _new_file(size) if comm.rank == 0 else ("", "")
        file = -1
        try:
            path, why = told(comm, path), first_reason(comm, why)
            if why:
                return None, why
            file, memory, why = _map(path, size)
            why = first_reason(comm, why)                    # all have opened it now, or never will
        finally:
            if comm.rank == 0 and path:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        try:
            mine = comm.rank % parts
            why = why or first_reason(comm, _allocate(file, mine * part, part)) or first_reason(comm, _populate_all(memory))
        finally:
            if file >= 0:
                os.close(file)
        return (None, why) if why or memory is None else (cls(memory), "")

    def close(self) -> None:
        """Give the memory back. No view of it may be used afterwards."""
        self.bytes = np.empty(0, np.uint8)


def _new_file(size: int) -> tuple[str, str]:
    """(path, "") of a new file of `size` bytes, none of them allocated; or ("", why not)."""
    path = ""
    try:
        file, path = tempfile.mkstemp(prefix=PREFIX, dir=folder())
        try:
            os.ftruncate(file, size)
        finally:
            os.close(file)
    except OSError as error:
        if path:
            os.unlink(path)
        return "", _reason(error.errno, size)
    return path, ""


def _map(path: str, size: int) -> tuple[int, mmap.mmap | None, str]:
    """(open file, its memory, "") or (open file or -1, None, why not)."""
    file = -1
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        return file, mmap.mmap(file, size), ""
    except OSError as error:
        return file, None, _reason(error.errno, size)


def _allocate(file: int, start: int, size: int) -> str:
    """Have the kernel allocate these bytes of the file, on this rank's NUMA node; "", or why not."""
    try:
        if size:
            os.posix_fallocate(file, start, size)
    except OSError as error:
        return _reason(error.errno, size)
    return ""


def _populate_all(memory: mmap.mmap | None) -> str:
    assert memory is not None
    number = _populate(np.frombuffer(memory, np.uint8))
    return _reason(number, len(memory)) if number else ""


def _reason(number: int | None, size: int) -> str:
    """Why this rank cannot have `size` bytes of shared memory, from the error number: the limit, what was found, the remedy."""
    wanted = f"where {-(-size // MIB)} MiB of shared memory are needed"
    if number == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return f"files may have {limit / MIB:.4g} MiB (ulimit -f) {wanted}; raise that limit"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if number == errno.ENOMEM and limit != resource.RLIM_INFINITY:
        return f"a process may have {limit >> 20} MiB (ulimit -v), {_mapped() >> 20} of them taken, {wanted}; raise that limit"
    text = f"{folder()}: {os.strerror(number or errno.EIO)} {wanted}"
    return f"{text}; {_remedy()}" if number in (errno.ENOSPC, errno.ENOMEM) else text


def _mapped() -> int:
    """The bytes of address space that this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def _least(comm: MPI.Intracomm, number: int) -> int:
    """The smallest of the ranks' numbers."""
    from mpi4py import MPI
    found = np.array([number], np.int64)
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MIN)
    return int(found[0])


def told(comm: MPI.Intracomm, text: str, root: int = 0) -> str:
    """The text of rank `root`, on all ranks."""
    buffer = np.zeros(TEXT, np.uint8)
    if comm.rank == root:
        letters = os.fsencode(text)[:TEXT]
        buffer[:len(letters)] = np.frombuffer(letters, np.uint8)
    comm.Bcast(buffer, root)
    return os.fsdecode(buffer.tobytes().rstrip(b"\0"))


def first_reason(comm: MPI.Intracomm, reason: str) -> str:
    """The reason of the first rank that has one, on all ranks; "" if none has. It waits for all ranks."""
    first = _least(comm, comm.rank if reason else comm.size)
    return told(comm, reason, first) if first < comm.size else ""


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
