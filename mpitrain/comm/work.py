"""The two faces of a collective: `Work` in flight, and `Collective`, prepared once and started often."""

from __future__ import annotations

from typing import Protocol


class Work(Protocol):
    """A collective on its way: `test` moves it on and says whether its result is there, `wait` returns when it is."""

    @property
    def done(self) -> bool: ...
    def test(self) -> bool: ...
    def wait(self) -> None: ...


class Collective(Protocol):
    """A collective over one array, prepared (persistent, as MPI 4 calls it): done as often as wanted, once at a time."""

    def start(self) -> Work:
        """Begin, and return; the array belongs to the work until that is done. Any number of collectives may be in flight."""
    def run(self) -> None:
        """`start` and `wait`, the fastest way there is."""
