"""Runs all ranks' rounds against each other in one process, on symbols instead of numbers, with rendezvous messages.

A send ends only when its receive is posted, so nothing that runs here relies on an MPI's buffering. Memory holds symbols
(`values.py`): two ranks whose results are the same symbols hold the same bits for every possible input. Rounds are asked for one
at a time, so what is kept is a round and the memory of each rank, whatever the length of the program and of the arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from mpitrain.schedules.steps import Copy, Receive, Reduce, Round, ScheduleError, Send, Slice, slices_of
from mpitrain.schedules.values import EMPTY, Memory, Run, Symbols, added, shifted

Messages: TypeAlias = dict[int, deque[Slice]]                 # Messages by peer, in the order in which they are matched.


class Rank:
    """One rank's memory and the messages of its current round."""

    def __init__(self, rank: int, program: Iterable[Round], data: Memory, n: int, length: int, symbols: Symbols):
        self.rank, self.program, self.index, self.n, self.length, self.symbols = rank, iter(program), -1, n, length, symbols
        self.memory = {"data": data, "inbox": Memory()}
        self.sends: Messages = {}
        self.receives: Messages = {}
        self.next_round()

    @property
    def done(self) -> bool:
        return self.round is None

    def next_round(self) -> None:
        self.round = next(self.program, None)
        self.index += 1
        if self.round is None:
            return
        check_memory(self.rank, self.index, self.round, self.length)
        for step in self.round:
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
        for step in self.round or ():
            if isinstance(step, Reduce):
                left, right = (shifted(self.read(part), step.into.start - part.start) for part in (step.left, step.right))
                self.write(step.into, added(left, right, self.symbols))
            elif isinstance(step, Copy):
                self.write(step.into, shifted(self.read(step.what), step.into.start - step.what.start))

    def read(self, part: Slice) -> list[Run]:
        runs = self.memory[part.buffer].runs(part.start, part.stop)
        if any(run.symbol == EMPTY for run in runs):
            raise ScheduleError(f"rank {self.rank}, round {self.index}: {part} is read before anything arrived there")
        return runs

    def write(self, part: Slice, runs: Sequence[Run]) -> None:
        self.memory[part.buffer].write(part.start, part.stop, runs)


def execute(programs: Sequence[Iterable[Round]], memories: Sequence[Memory], length: int, symbols: Symbols,
            rounded: bool = False) -> None:
    """Run all ranks' rounds against each other on their `data` memories of `length` elements. ScheduleError when it cannot end.

    With `rounded` what is sent is rounded to 16 bits, for the sender itself too.
    """
    ranks = [Rank(rank, program, data, len(programs), length, symbols)
             for rank, (program, data) in enumerate(zip(programs, memories))]
    busy = [rank for rank in ranks if not rank.done]
    while busy:
        moved = False
        for rank in busy:
            moved |= deliver(rank, ranks, rounded)
        for rank in busy:
            if not rank.sends and not rank.receives:
                rank.compute()
                rank.next_round()
                moved = True
        if not moved:
            raise ScheduleError(f"deadlock: {circle(ranks)}")
        busy = [rank for rank in busy if not rank.done]


def deliver(sender: Rank, ranks: Sequence[Rank], rounded: bool) -> bool:
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
            values = sender.read(what)
            if rounded:
                values = [run._replace(symbol=sender.symbols.rounded(run.symbol)) for run in values]
                sender.write(what, values)
            ranks[peer].write(into, shifted(values, into.start - what.start))
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


def check_memory(rank: int, index: int, round_: Round, length: int) -> None:
    """ScheduleError for slices outside their buffer, and for messages of one round that meet in memory.

    The data are of `length`; the inbox is as long as somebody reaches.
    """
    for step in round_:
        parts = slices_of(step)
        for part in parts:
            if not 0 <= part.start <= part.stop or part.buffer == "data" and part.stop > length:
                outside = f"outside a buffer of {length}" if part.buffer == "data" else "no slice of the inbox"
                raise ScheduleError(f"rank {rank}, round {index}: {part} is {outside}")
        if len(parts) > 1 and len({part.length for part in parts}) > 1:
            raise ScheduleError(f"rank {rank}, round {index}: {step} has parts of different lengths")
    used = sorted((part.buffer, part.start, part.stop, arrives, part) for arrives, part in
                  [(True, step.into) for step in round_ if isinstance(step, Receive) and step.into.length]
                  + [(False, step.what) for step in round_ if isinstance(step, Send) and step.what.length])
    furthest: dict[tuple[str, bool], Slice] = {}              # The message of each kind that reaches furthest up in each buffer.
    for buffer, start, stop, arrives, part in used:
        for other_arrives in (True, False) if arrives else (True,):
            other = furthest.get((buffer, other_arrives))
            if other is not None and start < other.stop:
                into, using = (part, other) if arrives else (other, part)
                raise ScheduleError(f"rank {rank}, round {index}: a message arrives in {into} while another one uses {using}")
        if (buffer, arrives) not in furthest or stop > furthest[buffer, arrives].stop:
            furthest[buffer, arrives] = part
