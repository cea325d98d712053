"""The ranks that share this host, and the memory they share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.comm.messages.algorithms import gather_numbers
from mpitrain.comm.messages.buffers import Host
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.shared.alive import Alive
from mpitrain.comm.shared.window import Window, free_bytes
from mpitrain.errors import PeerError

if TYPE_CHECKING:
    from mpi4py import MPI

CORES = 8192                                                  # more than the numbers of cores that Linux gives

class Node:
    """The ranks of `comm` on this host; `rank` and `size` count among them. All methods are collective over them.

    `color` puts the ranks that pass the same number on a node of their own, to act several nodes on one machine. `free` returns
    the free bytes of shared memory. `notes` says, a line each, why memory could not be shared, and `obstacle` is the
    last reason alone.
    """

    def __init__(self, comm: MPI.Intracomm, progress: Progress, *, color: int | None = None,
                 free: Callable[[], int] = free_bytes):
        from mpi4py import MPI
        self.base, self.progress = comm, progress
        host: Any = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        if color is not None:
            whole, host = host, host.Split(color, comm.rank)
            whole.Free()
        self.comm: MPI.Intracomm = host
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank: int = host.rank
        self.size: int = host.size
        self.ranks: list[int] = gather_numbers(host, comm.rank)     # the ranks of `comm`, by their number on the node
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        bound = np.zeros(CORES, np.uint8)
        bound[list(cores)] = 1
        host.Allreduce(MPI.IN_PLACE, bound, MPI.MAX)
        self.cores = int(bound.sum())                         # ranks bound to cores have different ones
        self.notes: list[str] = []
        self.obstacle = ""
        self._free = free
        self._windows: list[Window] = []
        self._alive = Alive(host)

    @property
    def crowded(self) -> bool:
        """Whether the ranks outnumber the cores they may use together: then a spinning rank keeps another from working."""
        return self.size > self.cores

    def allocate(self, nbytes: int, name: str) -> list[Host] | None:
        """A part of `nbytes` bytes for each rank of the node, which all see, zero at first; None, with a note, where refused.

        Parts begin on pages. They are freed by `close`.
        """
        block = self._block(nbytes, self.size, name)
        if block is None:
            return None
        part = block.size // self.size
        return [block[rank * part:rank * part + nbytes] for rank in range(self.size)]

    def block(self, nbytes: int, name: str) -> Host | None:
        """`nbytes` bytes that all ranks of the node see, zero at first; None, with a note, where refused."""
        block = self._block(nbytes, 1, name)
        return None if block is None else block[:nbytes]

    def check_alive(self, doing: str) -> None:
        """PeerError naming a rank of `comm` on this node that has ended."""
        dead = self._alive.dead()
        if dead:
            raise PeerError(f"{doing}: rank {self.ranks[dead[0]]} on this host has ended; see its own output for the cause, "
                            f"then start again with --resume")

    def close(self) -> None:
        """Free all memory and the communicator. No view of the memory may be used afterwards."""
        for window in reversed(self._windows):
            window.close()
        self._windows.clear()
        self.comm.Barrier()                                   # a lock given up early would look like a rank that died
        self._alive.close()
        self.comm.Free()

    def abandon(self) -> None:
        """Give up the memory and the lock, so that ranks that wait for this one take it for lost. It does not communicate."""
        for window in reversed(self._windows):
            window.close()
        self._windows.clear()
        self._alive.close()

    def _block(self, nbytes: int, parts: int, name: str) -> Host | None:
        window, reason = (None, self._alive.why_not) if self._alive.why_not else \
            Window.make(self.comm, nbytes, parts, free=self._free)
        if window is None:
            self.obstacle = reason
            self.notes.append(f"{name}: no shared memory on this node, messages instead: {reason}")
            return None
        self._windows.append(window)
        return window.bytes
