"""Captured graphs of the stand-in: while a stream captures nothing is computed, and what was asked for is done at each launch.

What a program reads from a device array while it captures is therefore poison here, as it is stale on a GPU; numbers of the host
that it passed are frozen; what it brings up is poison, too, since a graph would read the pinned memory that CuPy has used for
something else by then; and to wait for the device, or to bring memory down otherwise than by asynchronous copies between fixed
places, ends the capture with an error, as CUDA's would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Work = Callable[[], Any]


class Graph:
    """What was captured, to be launched as often as wanted. `kernels`: how many nodes it has."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    @property
    def nodes(self) -> int:
        return len(self.works)

    def launch(self, stream: Any = None) -> None:
        assert _open is None, "a graph is launched while another is captured"
        from device_counts import note
        note("graph")
        for work in self.works:
            work()

    def upload(self, stream: Any = None) -> None:
        """CuPy's graphs have it: the device gets the graph before its first launch."""


_open: Graph | None = None


def capturing() -> bool:
    return _open is not None


def begin() -> None:
    global _open
    assert _open is None, "the stream captures already"
    _open = Graph()


def end() -> Graph:
    global _open
    assert _open is not None, "the stream does not capture"
    graph, _open = _open, None
    return graph


def forbidden(what: str) -> None:
    """To be called by what waits for the device: RuntimeError in a capture, which ends."""
    global _open
    if _open is not None:
        _open = None
        raise RuntimeError(f"cudaErrorStreamCaptureUnsupported: {what} while a stream captures")


def in_place(work: Work) -> None:
    """Does or records what writes into memory that is there."""
    if _open is None:
        work()
    else:
        _open.works.append(work)


def made(work: Work, poison: Callable[[np.ndarray], Any], views_of: list[np.ndarray]) -> Any:
    """What `work` returns, new arrays or views; in a capture the new ones are poison until the graph is launched."""
    if _open is None:
        return work()
    with np.errstate(all="ignore"):
        result = work()
    several = isinstance(result, list | tuple)
    parts = list(result) if several else [result]
    parts = [np.asarray(part) if isinstance(part, np.generic) else part for part in parts]
    new = [isinstance(part, np.ndarray) and part.size > 0 and not any(np.may_share_memory(part, x) for x in views_of)
           for part in parts]
    if any(new):
        def again() -> None:
            found = work()
            for part, value, is_new in zip(parts, found if several else [found], new):
                if is_new:
                    part[...] = value
        _open.works.append(again)
        for part, is_new in zip(parts, new):
            if is_new and part.flags.writeable:
                poison(part)
    return (type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)) if several else parts[0]
