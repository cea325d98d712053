"""Work of two streams on the same memory in no order, found whichever comes first here: the stand-in does all work at once.

    with watched():
        ...                  # AssertionError where a stream reads or writes what another one wrote, or writes what that one read,
                             # and it has not waited for an event of the other, nor the host in between

Each stream counts its work and knows how far others had come when it last waited for them (vector clocks: Mattern, 1989), and
each access to a range of addresses is kept with its stream and number. Kernels count as writing all their arrays; what graphs do
is not seen. Memory that was touched is not used again while somebody watches: CuPy's pool gives none of one stream to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import device_graphs
import numpy as np

Clock = dict[int, int]                            # by stream: how much of its work is known to be done


class Access(NamedTuple):
    low: int
    high: int
    stream: int
    number: int
    writes: bool
    what: str


class Races:
    def __init__(self) -> None:
        self.known: dict[int, Clock] = {}         # by stream
        self.host: Clock = {}
        self.accesses: list[Access] = []
        self.kept: list[Any] = []

    def clock(self, stream: int) -> Clock:
        return self.known.setdefault(stream, {})

    def touch(self, stream: int, what: str, reads: Iterable[np.ndarray], writes: Iterable[np.ndarray]) -> None:
        """The next work of a stream; it is after all that the host has waited for."""
        clock = self.clock(stream)
        merge(clock, self.host)
        clock[stream] = number = clock.get(stream, 0) + 1
        now = [Access(*np.lib.array_utils.byte_bounds(x), stream, number, write, what)
               for arrays, write in ((reads, False), (writes, True)) for x in arrays if x.nbytes]
        for access in now:
            for other in self.accesses:
                if other.stream != stream and (access.writes or other.writes) and other.low < access.high \
                        and access.low < other.high and clock.get(other.stream, 0) < other.number:
                    raise AssertionError(f"{what} and {other.what} of another stream are in no order, and one writes what the "
                                         "other reads or writes: an event is not waited for")
        self.accesses += now
        self.kept += [*reads, *writes]


def merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


_watching: Races | None = None


@contextmanager
def watched() -> Iterator[Races]:
    global _watching
    assert _watching is None, "somebody watches already"
    _watching = Races()
    try:
        yield _watching
    finally:
        _watching = None


def watching() -> bool:
    return _watching is not None and not device_graphs.capturing()


def touch(stream: Any, what: str, reads: Iterable[Any], writes: Iterable[Any]) -> None:
    """What is no array of memory is left out."""
    if _watching is not None and watching():
        _watching.touch(id(stream), what, *([x for x in those if isinstance(x, np.ndarray)] for those in (reads, writes)))


def recorded(stream: Any) -> Clock:
    """The clock of an event that a stream reaches after its work so far."""
    return {} if _watching is None else {**_watching.host, **_watching.clock(id(stream))}


def waits(stream: Any, clock: Clock) -> None:
    if _watching is not None:
        merge(_watching.clock(id(stream)), clock)


def host_waits(clock: Clock) -> None:
    if _watching is not None:
        merge(_watching.host, clock)
