"""Proves a collective for all ranks at once, without MPI: what is sent is received, nothing deadlocks, the result is right.

Messages have rendezvous semantics: a send ends only when its receive is posted, so nothing that passes here relies on an
MPI's buffering. Values are symbols: a leaf (rank, element) for each element a rank starts with, and one new symbol for each
distinct sum (left, right). Two ranks whose results are the same symbols hold the same bits for every possible input.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.schedules.collectives import binomial_broadcast
from mpitrain.schedules.steps import Algorithm, Copy, Receive, Reduce, Round, Send, Slice, inbox_length, slices_of


class ScheduleError(ConfigError):
    """A schedule that would hang, race, or compute something else; the message names rank and round."""

    code = "E_SCHEDULE"


class Leaf(NamedTuple):
    """One element of what `rank` started with."""

    rank: int
    element: int


class Symbols:
    """Symbols of sums, numbered so that equal expressions get equal numbers; each knows the leaves it adds up."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int, int], int] = {}
        self.leaves: list[tuple[Leaf, ...]] = []

    def leaf(self, rank: int, element: int) -> int:
        return self._number(("leaf", rank, element), (Leaf(rank, element),))

    def sum(self, left: int, right: int) -> int:
        return self._number(("sum", left, right), tuple(sorted(self.leaves[left] + self.leaves[right])))

    def _number(self, key: tuple[str, int, int], leaves: tuple[Leaf, ...]) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self.leaves)
            self.leaves.append(leaves)
        return self._numbers[key]


def check_all_reduce(algorithm: Algorithm, n: int, length: int) -> None:
    """ScheduleError unless every rank ends with each rank's contribution exactly once, added in the same order everywhere."""
    symbols = Symbols()
    results = execute([list(algorithm(rank, n, length)) for rank in range(n)], length, symbols)
    for index in range(length):
        expected = tuple(Leaf(rank, index) for rank in range(n))
        for rank, result in enumerate(results):
            found = symbols.leaves[result[index]]
            if found != expected:
                raise ScheduleError(f"rank {rank} of {n} ends with the sum of {list(map(tuple, found))} in element {index}; "
                                    f"it should be element {index} of each rank once")
            if result[index] != results[0][index]:
                raise ScheduleError(f"ranks 0 and {rank} of {n} add element {index} in different orders, "
                                    f"so their bits would differ")


def check_broadcast(n: int, length: int, root: int) -> None:
    """ScheduleError unless every rank ends with the root's data."""
    symbols = Symbols()
    programs = [list(partial(binomial_broadcast, root=root)(rank, n, length)) for rank in range(n)]
    for rank, result in enumerate(execute(programs, length, symbols)):
        if result != [symbols.leaf(root, index) for index in range(length)]:
            raise ScheduleError(f"rank {rank} of {n} does not end with the data of rank {root}")


class Rank:
    """One rank's memory and the messages of its current round."""

    def __init__(self, rank: int, program: Sequence[Round], length: int, symbols: Symbols):
        self.rank, self.program, self.index, self.symbols = rank, program, -1, symbols
        empty = -1                                            # reading an inbox nobody filled is an error
        self.memory = {"data": [symbols.leaf(rank, i) for i in range(length)],
                       "inbox": [empty] * inbox_length(program)}
        self.sends: dict[int, deque[Slice]] = {}
        self.receives: dict[int, deque[Slice]] = {}
        self.next_round()

    @property
    def done(self) -> bool:
        return self.index >= len(self.program)

    def next_round(self) -> None:
        self.index += 1
        if self.done:
            return
        check_memory(self.rank, self.index, self.program[self.index], {k: len(v) for k, v in self.memory.items()})
        for step in self.program[self.index]:
            if isinstance(step, Send):
                self.sends.setdefault(step.peer, deque()).append(step.what)
            elif isinstance(step, Receive):
                self.receives.setdefault(step.peer, deque()).append(step.into)

    @property
    def waiting(self) -> list[str]:
        return [f"{verb} {part} {word} rank {peer}" for verb, word, table in (("send", "to", self.sends),
                                                                             ("receive", "from", self.receives))
                for peer, parts in table.items() for part in parts]

    def compute(self) -> None:
        for step in self.program[self.index]:
            if isinstance(step, Reduce):
                self.write(step.into, [self.symbols.sum(a, b) for a, b in zip(self.read(step.left), self.read(step.right))])
            elif isinstance(step, Copy):
                self.write(step.into, self.read(step.what))

    def read(self, part: Slice) -> list[int]:
        values = self.memory[part.buffer][part.start:part.stop]
        if -1 in values:
            raise ScheduleError(f"rank {self.rank}, round {self.index}: {part} is read before anything arrived there")
        return values

    def write(self, part: Slice, values: list[int]) -> None:
        self.memory[part.buffer][part.start:part.stop] = values


def execute(programs: Sequence[Sequence[Round]], length: int, symbols: Symbols) -> list[list[int]]:
    """Run all ranks' rounds against each other; what each rank's data holds at the end. ScheduleError when it cannot."""
    ranks = [Rank(rank, program, length, symbols) for rank, program in enumerate(programs)]
    while not all(rank.done for rank in ranks):
        moved = False
        for rank in ranks:
            moved |= deliver(rank, ranks)
        for rank in ranks:
            if not rank.done and not rank.waiting:
                rank.compute()
                rank.next_round()
                moved = True
        if not moved:
            stuck = "; ".join(f"rank {rank.rank} in round {rank.index} waits to {', '.join(rank.waiting)}"
                              for rank in ranks if not rank.done)
            raise ScheduleError(f"deadlock: {stuck}")
    return [rank.memory["data"] for rank in ranks]


def deliver(sender: Rank, ranks: Sequence[Rank]) -> bool:
    """Move every message of `sender` whose receive is posted; whether any was."""
    moved = False
    for peer, parts in list(sender.sends.items()):
        if not 0 <= peer < len(ranks) or peer == sender.rank:
            raise ScheduleError(f"rank {sender.rank}, round {sender.index}: sends to rank {peer} of {len(ranks)}")
        posted = ranks[peer].receives.get(sender.rank, deque())
        while parts and posted:
            what, into = parts.popleft(), posted.popleft()
            if what.length != into.length:
                raise ScheduleError(f"rank {sender.rank}, round {sender.index} sends {what} to rank {peer}, which receives "
                                    f"{into} in round {ranks[peer].index}: {what.length} elements against {into.length}")
            ranks[peer].write(into, sender.read(what))
            moved = True
        for table, key, queue in ((sender.sends, peer, parts), (ranks[peer].receives, sender.rank, posted)):
            if not queue:
                table.pop(key, None)
    return moved


def check_memory(rank: int, index: int, round_: Round, lengths: dict[str, int]) -> None:
    """ScheduleError for slices outside their buffer, and for messages of one round that meet in memory."""
    for step in round_:
        for part in slices_of(step):
            if not 0 <= part.start <= part.stop <= lengths[part.buffer]:
                raise ScheduleError(f"rank {rank}, round {index}: {part} is outside a buffer of {lengths[part.buffer]}")
        if len({part.length for part in slices_of(step)}) > 1:
            raise ScheduleError(f"rank {rank}, round {index}: {step} has parts of different lengths")
    written = [step.into for step in round_ if isinstance(step, Receive)]
    touched: Iterable[Slice] = [step.what for step in round_ if isinstance(step, Send)]
    for position, part in enumerate(written):
        for other in [*touched, *written[position + 1:]]:
            if part.buffer == other.buffer and part.start < other.stop and other.start < part.stop:
                raise ScheduleError(f"rank {rank}, round {index}: a message arrives in {part} "
                                    f"while another one uses {other}")
