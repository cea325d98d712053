"""Workers that do not wait for each other: a round whose results are applied one after the other, in the order of their arrival.

    rank 0    parameters v0 --> v1 --> v2 ...      starts turns from the newest version, applies what arrives (arrivals.py),
                  |      ^ delta                   and trains its own workers meanwhile, a local step at a time
    rank r    v0 -+----->+                         trains the workers on its seats, in the order of their start

    buffer of K results     v <- v - rate / K sum_k (1 + s_k)^-discount w_k (theta_start,k - theta_k)

FedBuff (Nguyen et al., 2022), and with K = 1 the delta form of FedAsync (Xie, Koyejo, Gupta, 2019). w_k is a worker's weight,
1 in the mean over the round, and s_k the versions that were made while it trained. A round ends when all its turns have arrived,
and only then do all ranks have the parameters: nothing is under way in a checkpoint. With the order of a clock or of a record
the result is a function of that order alone, on any number of ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpitrain.backend import Array
from mpitrain.data.rounds import Rounds, Turn
from mpitrain.parallel.workers.local import LocalTraining
from mpitrain.parallel.workers.tallies import RoundTallies
from mpitrain.schedules.arrivals import Arrival, Order, Pace, Player, Round
from mpitrain.schedules.microtree import share

if TYPE_CHECKING:
    from mpitrain.comm.messages.link import Link, Message


class Seated(NamedTuple):
    """A turn of a round: the worker, its seat, its weight in the mean, and how many local steps it takes."""

    worker: int
    seat: int
    weight: float
    steps: int


def seated(rounds: Rounds, round: int) -> list[Seated]:
    """The turns of a round, in the order in which they start: seats in the order of their reversed bits, so that the first few
    are spread over the ranks, however many there are."""
    arrived = rounds.draw.arrived(round)
    weights, bits = rounds.weights(arrived), max(rounds.seats - 1, 1).bit_length()
    found = [(number, int(f"{seat:0{bits}b}"[::-1], 2), place, seat) for seat, places in enumerate(rounds.seated(len(arrived)))
             for number, place in enumerate(places)]
    return [Seated(int(arrived[place]), seat, float(weights[place]), rounds.local.count(int(rounds.sizes[arrived[place]])))
            for *_, place, seat in sorted(found)]


class Paced(LocalTraining):
    """The round of a rank. `order_of(round, turns)` says who arrives when, `link` connects the ranks of the seats, and `rate` is
    that of the parameters' changes."""

    def __init__(self, *pipeline: Any, rounds: Rounds, pace: Pace, order_of: Callable[[int, Sequence[Seated]], Order], link: Link,
                 rate: float, **options: Any):
        super().__init__(*pipeline, rounds=rounds, **options)
        self.pace, self.order_of, self.link, self.rate, self.rounds = pace, order_of, link, rate, rounds
        self.tallies = self.paced = PacedTallies(self.stage, rounds, self.deltas, self.tallies.bytes_of_each)
        self.found: list[dict[str, Any]] = []                 # Rank 0: the arrivals of the last round, a line of the record each.
        self._server: Server | None = None

    def _take_turns(self, turns: Sequence[Turn], lr: float, losses: np.ndarray[Any, Any]) -> None:
        everyone = seated(self.rounds, self.policy.step)
        mine = {turn.worker: turn for turn in turns}
        begun = self.values.copy()

        def train(one: Seated, start: Array) -> Array:
            """The weighted delta of a worker that begins at `start`."""
            self.start[...] = start
            turn, weighted = mine[one.worker], np.empty_like(start)
            with self.span("compute", f"worker {one.worker}"):
                losses[one.seat] += one.weight * self._train(turn, lr)
                self.deltas.add(turn, self.delta, weighted, first=True)
            return weighted

        if self.link.rank:
            self._answer(everyone, train)
        elif everyone:
            self._server = server = Server(self, everyone, begun)
            server.run(train)
            self._server = None
            np.subtract(begun, server.theta, out=self.seat)
            self.found = server.lines
            self.paced.stale = sum(arrival.staleness for arrival in server.player.arrivals), server.player.round.version
            self._deliver(0, last=True)
        self.start[...] = begun

    def between(self) -> None:
        if self._server is not None:
            self._server.advance()

    def owner(self, seat: int) -> int:
        """The rank of a seat."""
        n = self.link.size
        return next(rank for rank in range(n) if share(rank, n, self.rounds.seats)[1] > seat)

    def _answer(self, everyone: Sequence[Seated], train: Callable[[Seated, Array], Array]) -> None:
        for k, one in enumerate(everyone):
            if self.owner(one.seat) == self.link.rank:
                start = self.link.receive(self.values.shape, self.values.dtype, 0, 2 * k, f"the parameters of turn {k}")
                start.wait()
                self.link.send(train(one, start.array), 0, 2 * k + 1, f"the result of turn {k}")
        self.link.finish()


class Server:
    """Rank 0 in a round: the newest parameters, `theta`, and what is on its way."""

    def __init__(self, paced: Paced, everyone: Sequence[Seated], begun: Array):
        self.paced, self.everyone, self.theta = paced, everyone, begun.copy()
        self.lines: list[dict[str, Any]] = []
        self._sum, self._count = np.zeros_like(begun), 0
        self._own: dict[int, Array] = {}                      # Turns of this rank that have started, and not begun to train.
        self._coming: dict[int, Message] = {}
        self._there: dict[int, Array] = {}                    # Results of this rank.
        self._began = time.perf_counter()
        order = paced.order_of(paced.policy.step, everyone)
        self.player = Player(Round(len(everyone), paced.pace), order, self._start, self._take)

    def run(self, train: Callable[[Seated, Array], Array]) -> None:
        """Until all results are applied."""
        while not self.advance():
            if self._own:
                k = next(iter(self._own))
                self._there[k] = train(self.everyone[k], self._own.pop(k))
            else:
                self.paced.link.progress.progress()
                os.sched_yield()
        self.paced.link.finish()

    def advance(self) -> bool:
        """Starts and applies what can be now; whether the round is over."""
        return self.player.advance(self._landed)

    def _start(self, k: int) -> None:
        owner, link = self.paced.owner(self.everyone[k].seat), self.paced.link
        if owner == link.rank:
            self._own[k] = self.theta.copy()
            return
        self._coming[k] = link.receive(self.theta.shape, self.theta.dtype, owner, 2 * k + 1, f"the result of turn {k}")
        link.send(self.theta.copy(), owner, 2 * k, f"the parameters of turn {k}")

    def _landed(self, k: int) -> bool:
        return k in self._there or (k in self._coming and self._coming[k].test())

    def _take(self, arrival: Arrival, new: bool) -> None:
        k = arrival.turn
        result: Array = self._there.pop(k) if k in self._there else self._coming.pop(k).array
        result *= result.dtype.type(arrival.factor * len(self.everyone))
        self._sum += result
        self._count += 1
        self.lines.append({"round": self.paced.policy.step + 1, "turn": k, "worker": self.everyone[k].worker,
                           "version": arrival.version, "staleness": arrival.staleness, "factor": arrival.factor,
                           "seconds": round(time.perf_counter() - self._began, 6)})
        if new:
            self._sum *= self._sum.dtype.type(self.paced.rate / self._count)
            self.theta -= self._sum
            self._sum[...], self._count = 0.0, 0


class PacedTallies(RoundTallies):
    """Also how stale results were, which rank 0 knows."""

    stale: tuple[int, int] = 0, 0                             # the sum of their staleness, and the versions made

    def take(self) -> np.ndarray[Any, Any]:
        (total, versions), self.stale = self.stale, (0, 0)
        return np.concatenate([super().take(), [total, versions]])

    def told(self, tally: np.ndarray[Any, Any], norm: float | None) -> dict[str, float]:
        found = super().told(tally[:-2], norm)
        found.pop("drift", None)                              # Workers began at different places.
        total, versions = tally[-2:]
        found |= {"staleness": float(total) / max(found["workers"], 1), "versions": int(versions)}
        return found
