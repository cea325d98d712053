"""What a thread is doing: recording a graph or not, computing a block again, working on a share of the batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any


class _Mode(threading.local):
    """What this thread is doing: recording a graph or not, who is told of each operation, in which module that runs,
    and which share of the global batch a backward is for."""

    recording = True
    recomputing = False
    by_rows = False
    keeps_inputs = False
    recorder: Callable[[type[Any], tuple[Any, ...], dict[str, Any], tuple[Any, ...]], None] | None = None
    forward_of: Callable[[type[Any]], Callable[..., Any]] | None = None
    held: list[Any] | None = None
    path = ""
    share: Callable[[], Any] | None = None

    def __init__(self) -> None:
        self.walks: list[Any] = []                # the backward passes in progress, innermost last


mode = _Mode()
recorders: list[Any] = []     # The recorders of all threads: reading an empty list is faster than reading `mode`.
replacing: list[Any] = []     # What runs in place of forward, in all threads: likewise.


@contextmanager
def holding_hooks() -> Iterator[list[Any]]:
    """The hooks of leaves are not called inside: the leaves whose gradients have become final come into the list, in order."""
    before, mode.held = mode.held, []
    try:
        yield mode.held
    finally:
        mode.held = before


def grad_enabled() -> bool:
    return mode.recording


class _Recording(ContextDecorator):
    """While it is entered, this thread records or does not; also a decorator. A generator would take longer."""

    def __init__(self, wanted: bool):
        self._wanted = wanted
        self._before: list[bool] = []             # one object may be entered again while it is entered

    def __enter__(self) -> None:
        self._before.append(mode.recording)
        mode.recording = self._wanted

    def __exit__(self, *_: object) -> None:
        mode.recording = self._before.pop()

    def _recreate_cm(self) -> _Recording:
        return _Recording(self._wanted)           # Each call has its own: threads may run a decorated function together.


def no_grad() -> _Recording:
    """Nothing computed inside is recorded: no memory is kept for backward."""
    return _Recording(False)


def enable_grad() -> _Recording:
    """Recording again, inside a `no_grad`."""
    return _Recording(True)


def recomputing() -> bool:
    """True while a block runs again for backward: side effects such as batch statistics were recorded the first time."""
    return mode.recomputing


class _ByRows:
    """What `row_by_row` gives: entered for each forward of one row, where a generator would be a twentieth of the time."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, mode.by_rows = mode.by_rows, True

    def __exit__(self, *_: object) -> None:
        mode.by_rows = self._before


def row_by_row() -> AbstractContextManager[None]:
    """While it is entered, products of layers give each row bits that depend on that row alone, whatever else is in the batch and
    however few rows there are; for forward without backward. Else products of few rows are BLAS's, which promises no such thing.
    Products that round their operands (bfloat16) stay as they are.
    """
    return _ByRows()


@contextmanager
def keep_inputs() -> Iterator[None]:
    """While it is entered, operations that are recorded keep their inputs, too: what derivatives of derivatives may need.

    Most operations have what `grad` with `create_graph` wants of them; those that keep a result or a slope instead of an input
    (GELU and SiLU by themselves, for instance) say that they want this.
    """
    before, mode.keeps_inputs = mode.keeps_inputs, True
    try:
        yield
    finally:
        mode.keeps_inputs = before


@contextmanager
def in_place_of_forward(find: Callable[[type[Any]], Callable[..., Any]]) -> Iterator[None]:
    """While it is entered, this thread runs ``find(function)`` for each operation in place of ``function.forward``, with the same
    arguments: so work is counted that nobody does. Other threads compute as ever."""
    before, mode.forward_of = mode.forward_of, find
    replacing.append(find)
    try:
        yield
    finally:
        mode.forward_of = before
        replacing.remove(find)


def batch_share() -> Any:
    """The weight of a term of the loss that a layer adds itself: the rows of the micro-batch whose backward runs, over those of
    the global batch; 1 where nobody says otherwise.

    A loss over samples is a sum, and its gradient comes to a layer with its scale. A layer's own term (the balance of experts) is
    one number for each micro-batch, and only the training loop knows its scale. Where the loss is scaled the share is, too: an
    array of one number on the device then.
    """
    return 1.0 if mode.share is None else mode.share()


@contextmanager
def part_of_batch(share: Callable[[], Any]) -> Iterator[None]:
    """While it is entered, `share()` is what a backward on this thread is for; asked only where a layer needs it."""
    before, mode.share = mode.share, share
    try:
        yield
    finally:
        mode.share = before
