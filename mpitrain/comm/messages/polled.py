"""The base class of works that are moved by polling, whatever they exchange."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpitrain.comm.messages.lost_peer import lost_peer
from mpitrain.comm.messages.progress import InFlight

if TYPE_CHECKING:
    from mpitrain.comm.messages.progress import Progress


class PolledWork(ABC):
    """A collective, or a message, that `_advance` moves on; it says whether the result is there, and calls `_land` once it is.

    The text `what` and the name of the `channel` are for errors and `Progress.in_flight`.
    """

    def __init__(self, what: str, channel: str, progress: Progress, finish: Callable[[], None]):
        from mpi4py import MPI
        self._mpi: Any = MPI
        self._what, self._channel, self._progress, self._finish = what, channel, progress, finish
        self._began = time.monotonic()
        self.done = False

    def __str__(self) -> str:
        return f'{self._what} on channel "{self._channel}"'

    def test(self) -> bool:
        """Whether the result is there. Never blocks."""
        return self.done or bool(self._guarded(self._advance))

    def wait(self) -> None:
        """Return when the result is there; other works in flight are moved meanwhile."""
        began = time.monotonic()
        while not self.test():
            self._progress.progress()
            self._progress.pause(began)
        self._progress.discard(self)

    def in_flight(self) -> list[InFlight]:
        return [InFlight(self._what, self._channel, self._began, self._peers())]

    def _peers(self) -> tuple[int, ...]:
        """The ranks of the channel whose messages this waits for, as far as it knows."""
        return ()

    @abstractmethod
    def _advance(self) -> bool: ...

    def _land(self) -> bool:
        self.done = True
        self._finish()
        return True

    def _guarded(self, action: Callable[[], Any]) -> Any:
        with lost_peer(self):
            return action()
