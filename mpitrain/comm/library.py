"""The MPI library's own all-reduce, as a choice and as the yardstick for ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpitrain.comm.buffers import Host
from mpitrain.comm.interpreter import Header
from mpitrain.errors import PeerError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.comm.progress import Progress


class LibraryWork:
    """An `MPI_Iallreduce` on its way, in pieces of at most `piece_bytes`, with the face of `interpreter.Work`.

    Posted at once, because all ranks must post theirs in one order; a rank that runs something else is found out by the
    header, whose check comes before anything here is waited for. The sum is in the order the library likes.
    """

    def __init__(self, comm: MPI.Comm, array: Host, *, label: str, header: Callable[[], Header] | None, progress: Progress,
                 finish: Callable[[], None], piece_bytes: int):
        from mpi4py import MPI
        self._mpi: Any = MPI
        self._comm, self._array, self._label = comm, array, label
        self._finish, self._progress = finish, progress
        self._piece = max(piece_bytes // array.itemsize, 1)
        self.done = False
        self._header: Header | None = self._guarded(header) if header is not None else None
        self._requests: list[MPI.Request] = self._guarded(self._post)

    def test(self) -> bool:
        """Whether the result is there. Never blocks."""
        return self.done or bool(self._guarded(self._advance))

    def wait(self) -> None:
        """Return when the result is there; others in flight are moved meanwhile."""
        while not self.test():
            self._progress.progress()
            os.sched_yield()
        self._progress.discard(self)

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
        self.done = True
        self._finish()
        return True

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except self._mpi.Exception as error:
            raise PeerError(f"{self._label}: MPI reports {error}; another rank was probably lost") from error
