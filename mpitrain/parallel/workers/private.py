"""What a worker tells, bounded, and hidden in noise or under masks (McMahan et al., 2018; Bonawitz et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from mpitrain.backend import Array
from mpitrain.data.keyed import key
from mpitrain.data.rounds import Rounds, Turn, uniform
from mpitrain.errors import TooFewError
from mpitrain.parallel.workers.deltas import Deltas
from mpitrain.privacy.fixed_point import FixedPoint
from mpitrain.privacy.mechanism import Mechanism
from mpitrain.privacy.secure_round import SecureRound, Sums


class PrivateDeltas(Deltas):
    """Each delta is clipped, and counts the same whatever rows are behind it; the sum gets noise, and is divided by how many
    workers a round draws on average."""

    compares = False                              # how far apart workers end is theirs to know

    def __init__(self, seats: int, mechanism: Mechanism):
        super().__init__(seats)
        self.mechanism = mechanism

    def add(self, turn: Turn, delta: Array, total: Array, *, first: bool) -> None:
        self.mechanism.bound(delta)
        if first:
            total[...] = delta
        else:
            total += delta

    def arrived(self, total: Array, round: int) -> Array:
        self.mechanism.release(total, round)
        return total


class SecureDeltas(PrivateDeltas):
    """Between workers and their sum there are masks: no rank has a sum of some workers in the clear.

    Those that do not answer (`workers.drop`) go at different times, by their key: before they share keys, or before they send.
    Of those that send, as many go before the masks are taken off. A round with too few is a sum of zero, and `tell` says so.
    """

    travels = False                               # what the arenas of gradients hold is zero

    def __init__(self, seats: int, mechanism: Mechanism, *, channel: Sums, rounds: Rounds, own_seats: Collection[int],
                 numbers: FixedPoint, threshold: float, tell: Callable[[str], None]):
        super().__init__(seats, mechanism)
        self.channel, self.rounds, self.own_seats, self.numbers = channel, rounds, own_seats, numbers
        self.threshold, self.tell = threshold, tell
        self.secure: SecureRound | None = None
        self.round, self.length = 0, 0

    def begin(self, round: int) -> None:
        super().begin(round)
        self.round = round
        draw = self.rounds.draw
        arrived = draw.arrived(round)
        silent = [int(n) for n in np.setdiff1d(draw.drawn(round), arrived) if self._chance([n], "silent")[0] < 0.5]
        seated = self.rounds.seated(len(arrived))
        own = [int(arrived[place]) for seat in self.own_seats for place in seated[seat]]
        own += silent[self.channel.rank::self.channel.size]
        try:
            self.secure = SecureRound(self.channel, [*map(int, arrived), *silent], own, self.numbers, self.length, self.threshold)
        except TooFewError as error:
            self._left_out(error)

    def add(self, turn: Turn, delta: Array, total: Array, *, first: bool) -> None:
        self.mechanism.bound(delta)
        if self.secure is not None:
            self.secure.add(turn.worker, delta)
        if first:
            total.fill(0.0)

    def arrived(self, total: Array, round: int) -> Array:
        total.fill(0.0)
        if self.secure is not None:
            try:
                total[...] = self.secure.finish(lambda n: float(self._chance([n], "gone")[0]) >= self.rounds.draw.drop)
            except TooFewError as error:
                self._left_out(error)
        self.secure = None
        return super().arrived(total, round)

    def _chance(self, workers: list[int], what: str) -> NDArray[np.float64]:
        return uniform(np.array(workers, np.int64), key(self.rounds.seed, what, self.round))

    def _left_out(self, error: TooFewError) -> None:
        self.secure = None
        self.tell(f"round {self.round + 1} adds no worker: {error.message}")
