"""The steps a collective algorithm is made of: plain data over named slices of two buffers.

`data` is the array being reduced or sent; `inbox` is scratch memory of the interpreter's, where neighbours' parts arrive.
Steps come in rounds. In one round all messages are in flight together (receives are posted first); when all have landed,
the round's `Reduce` and `Copy` steps run in their order, and the next round begins:

    rank 0   [Receive 1 -> inbox[0:4], Send 1 <- data[4:8]]   Reduce inbox[0:4] + data[0:4] -> data[0:4]     next round ...

Two ranks match the messages between them in the order in which they are written. Messages must not touch memory that another
message of the same round writes. `check.py` proves these things for all ranks of an algorithm at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

from mpitrain.errors import ConfigError


class ScheduleError(ConfigError):
    """A schedule that would hang, race, or compute something else; the message names rank and round, or stage."""

    code = "E_SCHEDULE"


class Slice(NamedTuple):
    """Elements [start, stop) of a buffer: "data", "inbox", or the packed values that an interpreter keeps beside them."""

    buffer: str
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


class Rooted(Protocol):
    """An algorithm with a rank that is not like the others."""

    def __call__(self, rank: int, n: int, length: int, root: int = 0) -> Iterator[Round]: ...


# The algorithms in which each rank does what its neighbour does, one rank further on, with parts of equal length where n
# divides the length: then all ranks' clocks agree, and one of them tells the time of all.
ROTATING: set[Algorithm] = set()
A = TypeVar("A", bound=Algorithm)


def rotating(algorithm: A) -> A:
    """Mark an algorithm as one of `ROTATING`."""
    ROTATING.add(algorithm)
    return algorithm


def data(start: int, stop: int) -> Slice:
    return Slice("data", start, stop)


def inbox(start: int, stop: int) -> Slice:
    return Slice("inbox", start, stop)


def slices_of(step: Step) -> tuple[Slice, ...]:
    """Every slice a step touches."""
    return step[1:] if isinstance(step, (Send, Receive)) else step           # Slicing is four times as fast as matching patterns.


def tree_split(n: int) -> int:
    """How many of n > 1 leaves of the fixed binary tree lie left of its root: the largest power of two below n.

        n = 5:   ((0 + 1) + (2 + 3)) + 4
    """
    return 1 << (n - 1).bit_length() - 1


def without_empty(round_: Round) -> Round:
    """The round less the steps that move nothing (arrays shorter than the ranks are many have empty parts)."""
    return [step for step in round_ if slices_of(step)[0].length]


def part(index: int, n: int, length: int) -> Slice:
    """Part `index` (modulo n) of `length` elements cut into n almost equal ones, some empty when length < n."""
    index %= n
    return data(index * length // n, (index + 1) * length // n)


def cut(n: int, length: int) -> list[Slice]:
    """All n parts of `length` elements."""
    return [part(index, n, length) for index in range(n)]


def ordered(mine: Slice, theirs: Slice, rank: int, peer: int) -> tuple[Slice, Slice]:
    """Two operands with the lower rank's on the left, so that both ranks add the same bits in the same order."""
    return (mine, theirs) if rank < peer else (theirs, mine)


def moved(rounds: Iterable[Round], *, ranks: Sequence[int] | None = None, data_by: int = 0, inbox_by: int = 0) -> Iterator[Round]:
    """The rounds for a group of ranks (place i stands for ranks[i]), on memory further up by so many elements."""
    by = {"data": data_by, "inbox": inbox_by}

    def shift(part: Slice) -> Slice:
        buffer, start, stop = part
        return Slice(buffer, start + by[buffer], stop + by[buffer]) if by[buffer] else part

    def move(step: Step) -> Step:
        if isinstance(step, Reduce):
            return Reduce(*map(shift, step))
        if isinstance(step, Copy):
            return Copy(*map(shift, step))
        peer, part = step
        return type(step)(peer if ranks is None else ranks[peer], shift(part))

    return ([move(step) for step in round_] for round_ in rounds)
