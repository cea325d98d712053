"""The MPI library's own all-reduce, as a choice and as the yardstick for ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpitrain.comm.messages.buffers import Host
from mpitrain.comm.messages.interpreter import Header
from mpitrain.comm.messages.polled import PolledWork

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.comm.messages.progress import Progress


class LibraryWork(PolledWork):
    """An `MPI_Iallreduce` on its way, in pieces of at most `piece_bytes`.

    All pieces are posted at once, because all ranks must post theirs in one order; the header finds a rank that runs another
    collective, and is checked before any piece is waited for. The library chooses the order of the sum.
    """

    def __init__(self, comm: MPI.Comm, array: Host, *, what: str, channel: str, header: Callable[[], Header] | None,
                 progress: Progress, finish: Callable[[], None], piece_bytes: int):
        super().__init__(what, channel, progress, finish)
        self._comm, self._array = comm, array
        self._piece = max(piece_bytes // array.itemsize, 1)
        self._header: Header | None = self._guarded(header) if header is not None else None
        self._requests: list[MPI.Request] = self._guarded(self._post)

    def _post(self) -> list[MPI.Request]:
        return [self._comm.Iallreduce(self._mpi.IN_PLACE, self._array[start:start + self._piece])
                for start in range(0, self._array.size, self._piece)]

    def _advance(self) -> bool:
        if self._header is not None and not self._header.test():
            return False
        if not self._mpi.Request.Testall(self._requests):
            return False
        if self._header is not None:
            self._header.wait_sent()
        return self._land()
