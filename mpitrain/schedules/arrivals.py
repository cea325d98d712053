"""Workers that train at their own pace: which turns are under way, whose result is applied next, and how stale it is.

A round of n turns, `in_flight` of them at once. Each begins where the parameters are when it starts; `buffer` results that
arrive make a new version of these (FedBuff, Nguyen et al., 2022; with a buffer of 1 FedAsync, Xie, Koyejo, Gupta, 2019):

    turn 0    v0 ------------> +                 staleness 1: turn 1 was applied meanwhile
    turn 1    v0 ----> +                         staleness 0
    turn 2             v1 ------------> +        staleness 1
                       v1      v2       v3

A result whose parameters are s versions old counts (1 + s)^-discount, and s never exceeds `staleness`: whoever is close to that
is waited for. When a round ends, all of its turns have arrived. Nothing here knows of ranks or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mpitrain.schedules.steps import ScheduleError


@dataclass(frozen=True)
class Pace:
    """How many turns are under way at once, how many results make a version, how stale one may be, and what that costs it."""

    in_flight: int
    buffer: int = 1
    staleness: int = 8
    discount: float = 0.5


class Arrival(NamedTuple):
    """A result that is applied: its turn, the version that it began with, how many were made since, and what it counts."""

    turn: int
    version: int
    staleness: int
    factor: float


class Round:
    """The turns of one round: `startable` says who begins, `expected` whose result may come next, `arrive` that one did.

    A turn may start, or be overtaken, only if all that are under way can still be applied in time: in any h + 1 versions to come
    there is room for those that have to be in one of them. Taking the most urgent one keeps that, so no round gets stuck.
    """

    def __init__(self, turns: int, pace: Pace):
        self.turns, self.pace = turns, pace
        self.version, self.started, self.arrived, self.waiting = 0, 0, 0, 0
        self.flying: dict[int, int] = {}                      # The version that each turn under way began with.

    @property
    def over(self) -> bool:
        return self.arrived == self.turns

    @property
    def startable(self) -> int | None:
        """The turn that starts now, from the present version; None while there is no room."""
        if self.started == self.turns or len(self.flying) >= self.pace.in_flight:
            return None
        return self.started if self._in_time([*self._slack(), self.pace.staleness], self.waiting) else None

    def start(self) -> int:
        """Lets `startable` begin; returns it."""
        turn = self.started
        self.flying[turn] = self.version
        self.started += 1
        return turn

    @property
    def expected(self) -> list[int]:
        """The turns whose results may be applied next."""
        return [turn for turn in self.flying if self._may_come(turn)]

    def arrive(self, turn: int) -> Arrival:
        """Takes the result of a turn. ScheduleError if that may not come next."""
        if turn not in self.flying or not self._may_come(turn):
            late = f"others would be more than {self.pace.staleness} versions old"
            raise ScheduleError(f"turn {turn} cannot arrive now: {late if turn in self.flying else 'it is not under way'}")
        version = self.flying.pop(turn)
        stale = self.version - version
        self.arrived += 1
        self.waiting += 1
        if self.waiting == self.pace.buffer or self.over:
            self.version, self.waiting = self.version + 1, 0
        return Arrival(turn, version, stale, (1.0 + stale) ** -self.pace.discount)

    @property
    def is_new(self) -> bool:
        """Whether the last result made a version, of all that had arrived since the one before."""
        return self.waiting == 0

    def _slack(self) -> list[int]:
        """How many versions may still be made before the one that holds each turn under way."""
        return [self.pace.staleness - (self.version - version) for version in self.flying.values()]

    def _may_come(self, turn: int) -> bool:
        others = [slack for other, slack in zip(self.flying, self._slack()) if other != turn]
        if self.waiting + 1 == self.pace.buffer:
            return self._in_time([slack - 1 for slack in others], 0)
        return self._in_time(others, self.waiting + 1)

    def _in_time(self, slack: Sequence[int], waiting: int) -> bool:
        return all(most >= 0 and sum(other <= most for other in slack) <= self.pace.buffer * (most + 1) - waiting
                   for most in slack)


class Order(Protocol):
    """Who is next: `started` is told of each turn that begins; `next` chooses one of those `expected`, which may still be under
    way, or none yet. `landed` says whose results are there."""

    def started(self, turn: int) -> None: ...
    def next(self, expected: Sequence[int], landed: Callable[[int], bool]) -> int | None: ...


class AsTheyCome:
    """The order in which results are there; the lowest turn of several."""

    def started(self, turn: int) -> None:
        """Whoever started is expected."""

    def next(self, expected: Sequence[int], landed: Callable[[int], bool]) -> int | None:
        return next((turn for turn in sorted(expected) if landed(turn)), None)


class Clock:
    """The order of a virtual clock: turn k takes `seconds[k]`, and who ends first arrives first (the lower turn of two)."""

    def __init__(self, seconds: Sequence[float]):
        self.seconds, self.now = seconds, 0.0
        self._ends: dict[int, float] = {}

    def started(self, turn: int) -> None:
        self._ends[turn] = self.now + self.seconds[turn]

    def next(self, expected: Sequence[int], landed: Callable[[int], bool]) -> int | None:
        turn = min(expected, key=lambda one: (self._ends[one], one))
        self.now = max(self.now, self._ends[turn])
        return turn


class Tape:
    """An order that was recorded. ScheduleError where it does not fit the round."""

    def __init__(self, turns: Sequence[int]):
        self._left = list(turns)

    def started(self, turn: int) -> None:
        """The tape knows."""

    def next(self, expected: Sequence[int], landed: Callable[[int], bool]) -> int | None:
        if not self._left or self._left[0] not in expected:
            found = f"turn {self._left[0]}" if self._left else "nothing"
            raise ScheduleError(f"{found} in the recorded order where one of the turns {list(expected)} must arrive")
        return self._left.pop(0)


class Player:
    """Runs a round, as far as results are there: `start(turn)` for each turn that begins, from the parameters as they are then,
    and `take(arrival, new)` for each result that is applied, the last one of a version where `new`."""

    def __init__(self, round: Round, order: Order, start: Callable[[int], None], take: Callable[[Arrival, bool], None]):
        self.round, self.order, self._start, self._take = round, order, start, take
        self.arrivals: list[Arrival] = []
        self._next: int | None = None

    def advance(self, landed: Callable[[int], bool] = lambda turn: True) -> bool:
        """Goes on until the next result is not there; whether the round is over."""
        round_ = self.round
        while True:
            while round_.startable is not None:
                turn = round_.start()
                self._start(turn)
                self.order.started(turn)
            if round_.over:
                return True
            if self._next is None:
                self._next = self.order.next(round_.expected, landed)
            if self._next is None or not landed(self._next):
                return False
            self.arrivals.append(round_.arrive(self._next))
            self._next = None
            self._take(self.arrivals[-1], round_.is_new)
