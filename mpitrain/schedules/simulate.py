"""Times a collective on a model of the machine, by running all ranks' rounds against each other as events.

The model (latency alpha, beta seconds a byte, gamma seconds for each byte that a Reduce or Copy writes):

- A message of s bytes takes alpha + beta s, from the moment when it starts. Until it ends it occupies the outgoing side of the
  sender's link and the incoming side of the receiver's, which carry one message at a time each. Both sides work at once.
- It is ready when its send and its receive are posted (rendezvous). Of its ready messages a rank starts the one written
  first; where the receiver is busy it waits for it. Receivers serve in the order of asking.
- A round's arithmetic begins when all the round's messages have ended, the next round when its arithmetic has. A rank
  computes when its messages have ended, and its links work meanwhile, as they do where messages need no processor.

There are no headers, no buffers, no contention beyond the links, and ranks start together: a lower bound to compare with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple, TypeAlias

from mpitrain.errors import ConfigError
from mpitrain.schedules.steps import ROTATING, Algorithm, Copy, Receive, Reduce, Round, ScheduleError, Send, slices_of

EXACT_RANKS = 64


class Machine(NamedTuple):
    """What messages and sums cost: alpha seconds a message, beta seconds a byte sent, gamma seconds a byte added up.

    With `nodes` (nodes[rank] is the rank's node) messages between two nodes cost `alpha_between` and `beta_between` instead.
    """

    alpha: float
    beta: float
    gamma: float
    nodes: Sequence[int] | None = None
    alpha_between: float = 0.0
    beta_between: float = 0.0


class Clock(NamedTuple):
    """A moment, and what lies on the way to it: messages, bytes sent and bytes added up one after the other."""

    seconds: float
    messages: int = 0
    sent: int = 0
    added: int = 0


START = Clock(0.0)
POST, ADD, LINK = range(3)                                    # Events: a rank's next round, its arithmetic; a free link.


class Program:
    """The rounds of a rank, and where it is in the current one."""

    __slots__ = ("rank", "rounds", "pending", "latest", "added", "index")

    def __init__(self, rank: int, rounds: Iterator[Round]):
        self.rank, self.rounds = rank, rounds
        self.pending, self.added, self.index = 0, 0, -1       # Messages that have not ended; bytes to add then.
        self.latest = START


Posted: TypeAlias = tuple[Program, int, int]                  # A program, the message's place among its rank's, its bytes.


class Simulation:
    """Events in order of time. Of one moment, links come last (2), so that they see all that is posted at that moment."""

    def __init__(self, machine: Machine, n: int, itemsize: int, *, rotating: bool):
        self.machine, self.n, self.itemsize, self.rotating = machine, n, itemsize, rotating
        ranks = 1 if rotating else n
        self.outgoing, self.incoming, self.finish = [START] * ranks, [START] * ranks, [START] * ranks
        self.ready: list[list[tuple[int, Program, Program, int]]] = [[] for _ in range(ranks)]
        self.asked = [False] * ranks                          # A rank is asked while its link has an event.
        self.sends: dict[int, deque[Posted]] = {}
        self.receives: dict[int, deque[Posted]] = {}
        self.events: list[tuple[float, int, int, Clock, Program | int]] = []
        self.tick, self.written = count(), count()

    def run(self, algorithm: Algorithm, length: int) -> list[Clock]:
        """When each rank has its result. ScheduleError for messages that do not match, or never meet."""
        programs = [Program(rank, algorithm(rank, self.n, length)) for rank in range(len(self.finish))]
        for program in programs:
            self.at(START, POST, program)
        while self.events:
            _, kind, _, now, what = heappop(self.events)
            if not isinstance(what, Program):
                self.start_message(what, now)
            elif kind == ADD:
                self.at(Clock(now.seconds + self.machine.gamma * what.added, now.messages, now.sent, now.added + what.added),
                        POST, what)
            else:
                self.next_round(what, now)
        waiting = next((program for program in programs if program.pending), None)
        if waiting is not None:
            raise ScheduleError(f"rank {waiting.rank} of {self.n} waits for ever in round {waiting.index}; the checks of "
                                f"mpitrain.schedules.check say for whom")
        return self.finish * (self.n if self.rotating else 1)

    def at(self, when: Clock, kind: int, what: Program | int) -> None:
        heappush(self.events, (when.seconds, kind, next(self.tick), when, what))

    def next_round(self, program: Program, now: Clock) -> None:
        round_ = next(program.rounds, None)
        if round_ is None:
            self.finish[program.rank] = now
            return
        program.index += 1
        program.latest, program.added = now, 0
        for step in round_:
            if isinstance(step, (Reduce, Copy)):
                program.added += step.into.length * self.itemsize
            else:
                program.pending += 1
        for step in round_:
            if isinstance(step, (Send, Receive)):
                self.post(step, program, now)
        if not program.pending:
            self.at(now, ADD if program.added else POST, program)

    def post(self, step: Send | Receive, program: Program, now: Clock) -> None:
        source, target = (program.rank, step.peer) if isinstance(step, Send) else (step.peer, program.rank)
        pair = (target - source) % self.n if self.rotating else source * self.n + target
        own, other = (self.sends, self.receives) if isinstance(step, Send) else (self.receives, self.sends)
        posted = (program, next(self.written), slices_of(step)[0].length * self.itemsize)
        waiting = other.get(pair)
        if not waiting:
            own.setdefault(pair, deque()).append(posted)
            return
        met = waiting.popleft()
        (sender, place, size), (receiver, _, room) = (posted, met) if isinstance(step, Send) else (met, posted)
        if size != room:
            raise ScheduleError(f"rank {source}, round {sender.index} sends {size // self.itemsize} elements to rank {target}, "
                                f"which receives {room // self.itemsize} in round {receiver.index}")
        heappush(self.ready[sender.rank], (place, sender, receiver, size))
        if not self.asked[sender.rank]:
            self.asked[sender.rank] = True
            self.at(max(now, self.outgoing[sender.rank]), LINK, sender.rank)

    def start_message(self, rank: int, now: Clock) -> None:
        _, sender, receiver, size = heappop(self.ready[rank])
        begin = max(now, self.incoming[receiver.rank])
        machine = self.machine
        alpha, beta = machine.alpha, machine.beta
        if machine.nodes is not None and machine.nodes[sender.rank] != machine.nodes[receiver.rank]:
            alpha, beta = machine.alpha_between, machine.beta_between
        end = Clock(begin.seconds + alpha + beta * size, begin.messages + 1, begin.sent + size, begin.added)
        self.outgoing[rank] = self.incoming[receiver.rank] = end
        for program in (sender, receiver):
            program.pending -= 1
            program.latest = max(program.latest, end)
            if not program.pending:
                self.at(program.latest, ADD if program.added else POST, program)
        self.asked[rank] = bool(self.ready[rank])
        if self.asked[rank]:
            self.at(end, LINK, rank)


def finish_times(algorithm: Algorithm, n: int, length: int, itemsize: int, machine: Machine) -> list[Clock]:
    """When each of n ranks has its result, starting together at 0. ConfigError for a machine or size that cannot be.

    Of a `ROTATING` algorithm one rank is run for all: exact where n divides the length, and used beyond `EXACT_RANKS` ranks
    for any length, rounded up to a multiple of n then. So 4,096 ranks of a ring take the time of one.
    """
    check(n, length, itemsize, machine)
    rotating = algorithm in ROTATING and machine.nodes is None and (length % n == 0 or n > EXACT_RANKS)
    if rotating:
        length += -length % n
    return Simulation(machine, n, itemsize, rotating=rotating).run(algorithm, length)


def simulate(algorithm: Algorithm, n: int, length: int, itemsize: int, machine: Machine) -> float:
    """Seconds until the last of n ranks has its result, for arrays of `length` elements of `itemsize` bytes."""
    return max(finish_times(algorithm, n, length, itemsize, machine)).seconds


def check(n: int, length: int, itemsize: int, machine: Machine) -> None:
    if n < 1 or length < 0 or itemsize < 1:
        raise ConfigError(f"cannot simulate {n} ranks with {length} elements of {itemsize} bytes; "
                          f"give at least 1 rank, 0 elements and 1 byte")
    costs = {name: getattr(machine, name) for name in ("alpha", "beta", "gamma", "alpha_between", "beta_between")}
    for name, value in costs.items():
        if not 0 <= value < inf:
            raise ConfigError(f"{name} of the machine is {value}; it should be a number of seconds, 0 or more")
    if machine.nodes is not None and len(machine.nodes) != n:
        raise ConfigError(f"the machine has nodes for {len(machine.nodes)} ranks, and {n} are simulated; "
                          f"give the node of each rank")
