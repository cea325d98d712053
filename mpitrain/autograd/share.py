"""Which part of a global batch the backward that runs now is for: what a term of the loss that layers add themselves counts.

A loss over samples is a sum, and its gradient comes to a layer with its scale. A layer's own term (the balance of experts) is one
number for each micro-batch, and its scale is the micro-batch's share of the global batch, which nobody but who runs it knows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Share(threading.local):
    now: Callable[[], float] | None = None


_share = _Share()


def batch_share() -> float:
    """The rows of the micro-batch whose backward runs, over those of the global batch; 1 where nobody says otherwise."""
    return 1.0 if _share.now is None else _share.now()


@contextmanager
def part_of_batch(share: Callable[[], float]) -> Iterator[None]:
    """While it is entered, `share()` is what a backward on this thread is for; asked only where a layer needs it."""
    before, _share.now = _share.now, share
    try:
        yield
    finally:
        _share.now = before
