"""Who moves the messages: Open MPI makes progress only inside MPI calls, so somebody must call it while others compute.

`Progress` is the `poll` policy: the engine calls `progress()` between backward nodes. On one node, 8 MB in flight during 20 ms
of compute: left alone, 1.0 to 1.6 ms of the exchange remain exposed afterwards; polled about once a millisecond, none does.
"""

from __future__ import annotations

from typing import Protocol


class Movable(Protocol):
    """What can be in flight: `interpreter.Work`, or anything that sums up to the same."""

    done: bool

    def test(self) -> bool: ...


class Progress:
    """Everything in flight, oldest first; one object for all channels that compute together."""

    def __init__(self) -> None:
        self._works: list[Movable] = []

    def __len__(self) -> int:
        return len(self._works)

    def add(self, work: Movable) -> None:
        if not work.done:
            self._works.append(work)

    def discard(self, work: Movable) -> None:
        if work in self._works:
            self._works.remove(work)

    def only(self, work: Movable) -> bool:
        """Whether nothing but `work` is in flight, so that blocking on it holds nobody up."""
        return not self._works or (len(self._works) == 1 and self._works[0] is work)

    def progress(self) -> None:
        """Move everything in flight as far as its messages have landed; returns at once when there is nothing."""
        if self._works:
            self._works = [work for work in self._works if not work.test()]
