"""The steps a collective algorithm is made of: plain data over named slices of two buffers.

`data` is the array being reduced or sent; `inbox` is scratch memory of the interpreter's, where neighbours' parts arrive.
Steps come in rounds. In one round all messages are in flight together (receives are posted first); when all have landed,
the round's `Reduce` and `Copy` steps run in their order, and the next round begins:

    rank 0   [Receive 1 -> inbox[0:4], Send 1 <- data[4:8]]   Reduce inbox[0:4] + data[0:4] -> data[0:4]     next round ...

Two ranks match the messages between them in the order in which they are written. Messages must not touch memory that another
message of the same round writes. `check.py` proves these things for all ranks of an algorithm at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeAlias


class Slice(NamedTuple):
    """Elements [start, stop) of one of the two buffers."""

    buffer: Literal["data", "inbox"]
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.buffer}[{self.start}:{self.stop}]"


class Send(NamedTuple):
    peer: int
    what: Slice


class Receive(NamedTuple):
    peer: int
    into: Slice


class Reduce(NamedTuple):
    """into = left + right, elementwise; `into` may be `left` or `right` itself."""

    left: Slice
    right: Slice
    into: Slice


class Copy(NamedTuple):
    what: Slice
    into: Slice


Step: TypeAlias = Send | Receive | Reduce | Copy
Round: TypeAlias = list[Step]
Algorithm: TypeAlias = Callable[[int, int, int], Iterator[Round]]      # (rank, n, length) -> that rank's rounds


def data(start: int, stop: int) -> Slice:
    return Slice("data", start, stop)


def inbox(start: int, stop: int) -> Slice:
    return Slice("inbox", start, stop)


def slices_of(step: Step) -> tuple[Slice, ...]:
    """Every slice a step touches."""
    match step:
        case Send(_, what): return (what,)
        case Receive(_, into): return (into,)
        case Reduce(left, right, into): return (left, right, into)
        case Copy(what, into): return (what, into)


def inbox_length(rounds: Iterable[Round]) -> int:
    """How many elements of inbox these rounds need."""
    return max((part.stop for round_ in rounds for step in round_ for part in slices_of(step) if part.buffer == "inbox"),
               default=0)


def without_empty(round_: Round) -> Round:
    """The round less the steps that move nothing (arrays shorter than the ranks are many have empty parts)."""
    return [step for step in round_ if slices_of(step)[0].length]
