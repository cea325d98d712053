"""Runs all ranks' rounds against each other in one process, on symbols instead of numbers, with rendezvous messages.

A send ends only when its receive is posted, so nothing that runs here relies on an MPI's buffering. Values are symbols: a
leaf (rank, element) for each element a rank starts with, and one new symbol for each distinct sum (left, right). Two ranks
whose results are the same symbols hold the same bits for every possible input.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from mpitrain.schedules.steps import (
    Copy,
    Receive,
    Reduce,
    Round,
    ScheduleError,
    Send,
    Slice,
    inbox_length,
    slices_of,
)

EMPTY = -1                                                    # what is in memory that nobody filled; reading it is an error


class Leaf(NamedTuple):
    """One element of what `rank` started with."""

    rank: int
    element: int


class Symbols:
    """Symbols of sums, numbered so that equal expressions get equal numbers; `sizes[symbol]` is how many leaves it adds up."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._parts: list[tuple[int, int, int]] = []
        self.sizes: list[int] = []

    def leaf(self, rank: int, element: int) -> int:
        return self._number((0, rank, element), 1)

    def sum(self, left: int, right: int) -> int:
        return self._number((1, left, right), self.sizes[left] + self.sizes[right])

    def leaves(self, symbol: int) -> list[Leaf]:
        """What a symbol adds up, sorted; mind its size before asking."""
        found, stack = [], [symbol]
        while stack:
            is_sum, first, second = self._parts[stack.pop()]
            if is_sum:
                stack += (first, second)
            else:
                found.append(Leaf(first, second))
        return sorted(found)

    def _number(self, key: tuple[int, int, int], size: int) -> int:
        number = self._numbers.setdefault(key, len(self.sizes))
        if number == len(self.sizes):
            self._parts.append(key)
            self.sizes.append(size)
        return number


Messages: TypeAlias = dict[int, deque[Slice]]                 # by peer, in the order in which they are matched


class Rank:
    """One rank's memory and the messages of its current round."""

    def __init__(self, rank: int, program: Sequence[Round], data: list[int], n: int, symbols: Symbols):
        self.rank, self.program, self.index, self.n, self.symbols = rank, program, -1, n, symbols
        self.memory = {"data": data, "inbox": [EMPTY] * inbox_length(program)}
        self.sends: Messages = {}
        self.receives: Messages = {}
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
                self.post(self.sends, "sends to", step.peer, step.what)
            elif isinstance(step, Receive):
                self.post(self.receives, "receives from", step.peer, step.into)

    def post(self, table: Messages, verb: str, peer: int, part: Slice) -> None:
        if not 0 <= peer < self.n or peer == self.rank:
            raise ScheduleError(f"rank {self.rank}, round {self.index}: {verb} rank {peer} of {self.n}")
        table.setdefault(peer, deque()).append(part)

    def waits(self) -> list[tuple[int, str]]:
        """Whom this rank waits for, and the words for it."""
        return [(peer, f"rank {self.rank} in round {self.index} waits to {verb} {part} {word} rank {peer}")
                for verb, word, table in (("send", "to", self.sends), ("receive", "from", self.receives))
                for peer, parts in table.items() for part in parts]

    def compute(self) -> None:
        for step in self.program[self.index]:
            if isinstance(step, Reduce):
                self.write(step.into, list(map(self.symbols.sum, self.read(step.left), self.read(step.right))))
            elif isinstance(step, Copy):
                self.write(step.into, self.read(step.what))

    def read(self, part: Slice) -> list[int]:
        values = self.memory[part.buffer][part.start:part.stop]
        if EMPTY in values:
            raise ScheduleError(f"rank {self.rank}, round {self.index}: {part} is read before anything arrived there")
        return values

    def write(self, part: Slice, values: list[int]) -> None:
        self.memory[part.buffer][part.start:part.stop] = values


def execute(programs: Sequence[Sequence[Round]], memories: Sequence[list[int]], symbols: Symbols) -> None:
    """Run all ranks' rounds against each other on their `data` memories. ScheduleError when it cannot end."""
    ranks = [Rank(rank, program, data, len(programs), symbols) for rank, (program, data) in enumerate(zip(programs, memories))]
    busy = [rank for rank in ranks if not rank.done]
    while busy:
        moved = False
        for rank in busy:
            moved |= deliver(rank, ranks)
        for rank in busy:
            if not rank.sends and not rank.receives:
                rank.compute()
                rank.next_round()
                moved = True
        if not moved:
            raise ScheduleError(f"deadlock: {circle(ranks)}")
        busy = [rank for rank in busy if not rank.done]


def deliver(sender: Rank, ranks: Sequence[Rank]) -> bool:
    """Move every message of `sender` whose receive is posted; whether any was."""
    moved = False
    for peer, parts in list(sender.sends.items()):
        posted = ranks[peer].receives.get(sender.rank)
        if not posted:
            continue
        while parts and posted:
            what, into = parts.popleft(), posted.popleft()
            if what.length != into.length:
                raise ScheduleError(f"rank {sender.rank}, round {sender.index} sends {what} to rank {peer}, which receives "
                                    f"{into} in round {ranks[peer].index}: {what.length} elements against {into.length}")
            ranks[peer].write(into, sender.read(what))
            moved = True
        if not parts:
            del sender.sends[peer]
        if not posted:
            del ranks[peer].receives[sender.rank]
    return moved


def circle(ranks: Sequence[Rank]) -> str:
    """Why nothing moves: a rank that waits for one that has ended, or the ranks that wait for each other in a circle.

    Where nobody waits for a rank that has ended, each waits for one that waits, and so on until one comes again.
    """
    waits = {rank.rank: rank.waits() for rank in ranks if not rank.done}
    for own in waits.values():
        for peer, words in own:
            if peer not in waits:
                return f"{words}, which has ended"
    way, at = [], next(iter(waits))
    while at not in way:
        way.append(at)
        at = waits[at][0][0]
    around = way[way.index(at):]
    return " -> ".join([*(waits[rank][0][1] for rank in around), f"rank {at}"])


def check_memory(rank: int, index: int, round_: Round, lengths: dict[str, int]) -> None:
    """ScheduleError for slices outside their buffer, and for messages of one round that meet in memory."""
    for step in round_:
        parts = slices_of(step)
        for part in parts:
            if not 0 <= part.start <= part.stop <= lengths[part.buffer]:
                raise ScheduleError(f"rank {rank}, round {index}: {part} is outside a buffer of {lengths[part.buffer]}")
        if len(parts) > 1 and len({part.length for part in parts}) > 1:
            raise ScheduleError(f"rank {rank}, round {index}: {step} has parts of different lengths")
    used = sorted((part.buffer, part.start, part.stop, arrives, part) for arrives, part in
                  [(True, step.into) for step in round_ if isinstance(step, Receive) and step.into.length]
                  + [(False, step.what) for step in round_ if isinstance(step, Send) and step.what.length])
    furthest: dict[tuple[str, bool], Slice] = {}              # the message that reaches furthest up, of each kind in each buffer
    for buffer, start, stop, arrives, part in used:
        for other_arrives in (True, False) if arrives else (True,):
            other = furthest.get((buffer, other_arrives))
            if other is not None and start < other.stop:
                into, using = (part, other) if arrives else (other, part)
                raise ScheduleError(f"rank {rank}, round {index}: a message arrives in {into} while another one uses {using}")
        if (buffer, arrives) not in furthest or stop > furthest[buffer, arrives].stop:
            furthest[buffer, arrives] = part


def check_lanes(lanes: Sequence[Iterable[Round]], rank: int) -> None:
    """ScheduleError for lanes of one rank that touch the same element: run at the same time, they would race."""
    touched = sorted({(part.buffer, part.start, part.stop, lane) for lane, rounds in enumerate(lanes) for round_ in rounds
                      for step in round_ for part in slices_of(step) if part.length})
    furthest: dict[tuple[str, int], int] = {}
    for buffer, start, stop, lane in touched:
        for (where, other), reach in furthest.items():
            if where == buffer and other != lane and start < reach:
                raise ScheduleError(f"rank {rank}: lanes {other} and {lane} both use {buffer}[{start}:{min(stop, reach)}]")
        furthest[buffer, lane] = max(stop, furthest.get((buffer, lane), 0))
