"""The MPI library's own all-reduce, as a choice and as the yardstick for ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpitrain.comm.messages.buffers import Host
from mpitrain.comm.messages.interpreter import HeadedWork, Start

if TYPE_CHECKING:
    from mpi4py import MPI


class LibraryWork(HeadedWork):
    """An `MPI_Iallreduce` on its way, in pieces of at most `piece_bytes`.

    All pieces are posted at once, because all ranks must post theirs in one order; the header finds a rank that runs another
    collective, and is checked before any piece is waited for. The library chooses the order of the sum.
    """

    def __init__(self, start: Start, array: Host, piece_bytes: int):
        super().__init__(start)
        self._array, self._piece = array, max(piece_bytes // array.itemsize, 1)
        self._requests: list[MPI.Request] = self._guarded(self._post)

    def _post(self) -> list[MPI.Request]:
        return [self._comm.Iallreduce(self._mpi.IN_PLACE, self._array[start:start + self._piece])
                for start in range(0, self._array.size, self._piece)]

    def _advance(self) -> bool:
        return self._same() and self._mpi.Request.Testall(self._requests) and self._land()
