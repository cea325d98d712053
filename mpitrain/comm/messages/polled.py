"""What every work shares that is moved by asking it again, whatever it exchanges."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpitrain.errors import PeerError

if TYPE_CHECKING:
    from mpitrain.comm.messages.progress import Progress


class PolledWork(ABC):
    """A collective that `_advance` moves on; it says whether the result is there, and calls `_land` once it is."""

    def __init__(self, label: str, progress: Progress, finish: Callable[[], None]):
        from mpi4py import MPI
        self._mpi: Any = MPI
        self._label, self._progress, self._finish = label, progress, finish
        self.done = False

    def test(self) -> bool:
        """Whether the result is there. Never blocks."""
        return self.done or bool(self._guarded(self._advance))

    def wait(self) -> None:
        """Return when the result is there; others in flight are moved meanwhile."""
        while not self.test():
            self._progress.progress()
            os.sched_yield()
        self._progress.discard(self)

    @abstractmethod
    def _advance(self) -> bool: ...

    def _land(self) -> bool:
        self.done = True
        self._finish()
        return True

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except self._mpi.Exception as error:
            raise PeerError(f"{self._label}: MPI reports {error}; another rank was probably lost") from error
