"""SCAFFOLD (Karimireddy et al., 2020): control variates take out of a worker's steps what leads it away from the others.

    local step    theta -= lr (g + c - c_k)
    after K       c_k' = c_k - c + (theta_start - theta_worker) / (K lr)          option II of the paper
    after all     c += 1/N sum over the round's workers of (c_k' - c_k)           N: all workers there are

c_k belongs to worker k, and moves with it (`hosts`); c is everyone's. All begin as zeros, so the sum of all c_k is N c.
"""

from __future__ import annotations

from mpitrain.backend import Array
from mpitrain.data.rounds import Turn
from mpitrain.parallel.workers.corrections import Correction, Means
from mpitrain.parallel.workers.hosts import Hosted, zeros_of
from mpitrain.parallel.workers.seat_sum import SeatSum


class Scaffold(Correction):
    sums = 2
    plain_sgd = True

    def arrays(self, workers: int) -> int:
        return 1 + workers

    def open(self, means: Means) -> None:
        storage, rounds = means.storage, means.rounds
        self.rate = storage.values.dtype.type
        self.count = rounds.draw.count
        self.shared["control"] = self.control = storage.new_flat()
        length, dtype = storage.values.size, storage.values.dtype
        self.hosted["control"] = self.own = Hosted(rounds, means.link, length, dtype, "the control variate")
        self.changes = SeatSum(means.channel, means.tree, length, dtype, "changes of control variates")
        self._pending: dict[int, Array] = {}

    def begin_round(self, round: int) -> None:
        self.round = round
        self._pending.clear()
        self.own.gather(round)

    def begin(self, turn: Turn, start: Array) -> None:
        self.offset = self.control - zeros_of(self.own, turn.worker)

    def add(self, gradient: Array, theta: Array) -> None:
        gradient += self.offset

    def end(self, turn: Turn, delta: Array, steps: int, lr: float) -> None:
        change = -self.control
        if lr > 0.0:                                          # At the rate 0 nobody moves, and nothing is learned of gradients.
            change += delta * self.rate(1.0 / (steps * lr))
        else:
            change.fill(0)
        self._pending[turn.worker] = zeros_of(self.own, turn.worker) + change
        self.changes.add(turn.index, change)

    def settle(self, happened: bool) -> None:
        total = self.changes.take()
        if happened:
            total *= self.rate(1.0 / self.count)
            self.control += total
            self.own.keep(self.round, self._pending)
