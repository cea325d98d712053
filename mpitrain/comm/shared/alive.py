"""Whether the other ranks of a node still live: each holds a lock that the kernel takes away when its process ends.

Process ids say nothing where ranks run in containers of their own, a dead child stays a zombie until its parent looks, and a
number is soon another process's. A record lock has none of that: rank i locks byte i of one file, for as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import tempfile
from typing import TYPE_CHECKING

from mpitrain.comm.shared.window import first_reason, folder, told

if TYPE_CHECKING:
    from mpi4py import MPI

_LOCK = struct.Struct("@hhqqi")                               # struct flock of 64-bit Linux: type, whence, start, length, pid


class Alive:
    """One lock for each rank of `comm`, which share a node. Made and closed by all ranks together.

    `why_not` is empty, or says why there are no locks: no folder that all ranks can write. The file has no name once all have
    opened it, so nothing is left behind. Nobody else may open it: closing any descriptor of a file frees a process's locks.
    """

    def __init__(self, comm: MPI.Intracomm):
        self._rank, self._size = comm.rank, comm.size
        self._file = -1
        path = told(comm, _new_file() or "" if comm.rank == 0 else "")
        reason = f"no folder for a lock file: neither {folder()} nor {tempfile.gettempdir()} can be written"
        if path:
            try:
                self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._rank)
                reason = ""
            except OSError as error:
                reason = f"lock file {path}: {error.strerror}"
        self.why_not = first_reason(comm, reason)             # a barrier too: nobody asks before all hold their locks
        if path and comm.rank == 0:
            os.unlink(path)

    def dead(self) -> list[int]:
        """The ranks of `comm` that have ended, by whatever cause. Asking takes about 2 us a rank."""
        return [rank for rank in range(self._size) if rank != self._rank and self._free(rank)]

    def _free(self, rank: int) -> bool:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        return bool(_LOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[0] == fcntl.F_UNLCK)

    def close(self) -> None:
        """Give up the lock; the caller makes sure that no rank asks any more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _new_file() -> str | None:
    for place in (folder(), tempfile.gettempdir()):
        with contextlib.suppress(OSError):
            number, path = tempfile.mkstemp(prefix="mpitrain-alive-", dir=place)
            os.close(number)                                  # no lock is held yet, so closing frees none
            return path
    return None
