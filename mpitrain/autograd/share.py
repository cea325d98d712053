"""The share of the global batch that the running backward is for: the weight of a term of the loss that a layer adds itself.

A loss over samples is a sum, and its gradient comes to a layer with its scale. A layer's own term (the balance of experts) is one
number for each micro-batch, and its scale is the micro-batch's share of the global batch, which only the training loop knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpitrain.autograd.tensor import mode


def batch_share() -> float:
    """The rows of the micro-batch whose backward runs, over those of the global batch; 1 where nobody says otherwise."""
    return 1.0 if mode.share is None else mode.share()


@contextmanager
def part_of_batch(share: Callable[[], float]) -> Iterator[None]:
    """While it is entered, `share()` is what a backward on this thread is for; asked only where a layer needs it."""
    before, mode.share = mode.share, share
    try:
        yield
    finally:
        mode.share = before
