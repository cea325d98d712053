"""Rounds of a federation: who is drawn, who answers, and the batches that a worker trains on, each a function of its key.

    round r    drawn(r) -> some workers, less those that do not answer -> arrived(r)
    seats      the micro-batches of a round: arrived workers in order, cut into so many runs of about equal length
    worker k   batches(k, r): rows of its own, by (seed, k, r), whoever else is drawn

Nothing here knows the number of ranks, and all ranks know everything here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.augment import Augmentation
from mpitrain.data.keyed import key, mix, sample_keys
from mpitrain.data.loader import Loader, MicroBatch
from mpitrain.data.sampler import Index, Sampler
from mpitrain.data.shards import Rows
from mpitrain.errors import MpitrainError

WHOLE = float(1 << 64)


@dataclass(frozen=True)
class Draw:
    """Of `count` workers those that take part in a round: exactly `each` of them, or (`poisson`) each with the probability
    `each`; of these, each one fails to answer with the probability `drop`."""

    count: int
    each: float
    poisson: bool
    drop: float
    seed: int

    @property
    def expected(self) -> float:
        """How many are drawn on average."""
        return self.each * self.count if self.poisson else self.each

    def drawn(self, round: int) -> NDArray[np.int64]:
        """The workers of a round, counted from 0, ascending."""
        everyone = np.arange(self.count, dtype=np.int64)
        if self.poisson:
            return everyone[uniform(everyone, key(self.seed, "poisson", round)) < self.each]
        if self.each == self.count:
            return everyone
        first = np.argsort(sample_keys(key(self.seed, "drawn", round), everyone), kind="stable")[:int(self.each)]
        return np.sort(first)

    def arrived(self, round: int) -> NDArray[np.int64]:
        """Those of them that answer."""
        drawn = self.drawn(round)
        return drawn[uniform(drawn, key(self.seed, "dropped", round)) >= self.drop] if self.drop else drawn


def uniform(numbers: NDArray[np.int64], base: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each of some whole numbers."""
    return sample_keys(base, numbers) / WHOLE


@dataclass(frozen=True)
class Local:
    """How long a worker trains in a round: so many epochs of its rows, or steps; an epoch's last batch may be short."""

    batch: int
    epochs: int
    steps: int                                # 0: `epochs`

    def count(self, rows: int) -> int:
        """The steps of a worker that has so many rows."""
        return self.steps or self.epochs * -(-rows // self.batch)

    def seen(self, rows: int) -> int:
        """How many rows a worker sees that has so many, counted as often as it sees them."""
        whole, rest = divmod(self.count(rows), -(-rows // self.batch))
        return whole * rows + rest * min(self.batch, rows)

    def orders(self, rows: int, base: int) -> NDArray[np.int64]:
        """(E, rows): the order of its rows in each epoch that it begins."""
        epochs = self.epochs if not self.steps else -(-self.steps // -(-rows // self.batch))
        keys = np.array([key(base, epoch) for epoch in range(epochs)], np.uint64)
        return np.argsort(mix(np.arange(rows, dtype=np.uint64) ^ keys[:, None]), axis=1, kind="stable")

    def batches(self, rows: int, base: int) -> list[tuple[int, NDArray[np.int64]]]:
        """(epoch, places among the worker's rows) of each step."""
        found = [(epoch, order[a:a + self.batch]) for epoch, order in enumerate(self.orders(rows, base))
                 for a in range(0, rows, self.batch)]
        return found[:self.count(rows)]


class Rounds(Sampler):
    """A federation's rounds in the place of a `Sampler`: the step of a run is a round. `rows[k]` are the dataset's rows of worker
    k, and `weights` says whether workers weigh as their rows do ("rows"), or equally."""

    def __init__(self, rows: Sequence[Rows], draw: Draw, local: Local, seats: int, weights: str = "rows"):
        self.index: Index = np.concatenate(list(rows))
        self.rows_of, self.draw, self.local, self.seats, self.by_rows = rows, draw, local, seats, weights == "rows"
        self.sizes = np.array([len(own) for own in rows], np.int64)
        self.seed, self.n = draw.seed, int(self.sizes.sum())
        self.steps_per_epoch = max(1, round(draw.count / max(draw.expected, 1e-9)))      # rounds in which each is drawn once
        self.batch = max(1, round(draw.expected * float(np.mean([local.seen(int(n)) for n in self.sizes]))))      # on average

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def rows(self, step: int, start: int = 0, stop: int | None = None) -> Rows:
        """The rows of the workers that train in a round."""
        arrived = self.draw.arrived(step)
        found = np.concatenate([self.rows_of[worker] for worker in arrived]) if len(arrived) else np.zeros(0, np.int64)
        return found[start:stop]

    def size(self, step: int) -> int:
        return int(self.sizes[self.draw.arrived(step)].sum())

    def weights(self, arrived: NDArray[np.int64]) -> NDArray[np.float64]:
        """What the change of each of these workers counts in their mean."""
        if not self.by_rows:
            return np.full(len(arrived), 1.0 / max(len(arrived), 1))
        sizes = self.sizes[arrived]
        return sizes / max(int(sizes.sum()), 1)

    def seated(self, arrived: int) -> list[range]:
        """The places, among so many workers, of those on each seat."""
        return [range(s * arrived // self.seats, (s + 1) * arrived // self.seats) for s in range(self.seats)]


@dataclass
class Turn(MicroBatch):
    """A worker in a round: `x`, `y` and `samples` are the rows that it will see, `step` is the round, and `index` its seat."""

    worker: int = 0
    weight: float = 0.0                       # of its change in the mean of the round
    plan: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)      # (epoch, places in x) of each local step
    base: int = 0                             # the key of all that is random in its round
    augment: Sequence[Augmentation] = ()

    def batch(self, number: int) -> MicroBatch:
        """The batch of a local step."""
        epoch, places = self.plan[number]
        x, samples = self.x[places], self.samples[places]
        for function in self.augment:
            x = function(x, sample_keys(key(self.base, "augment", epoch), samples))
        return MicroBatch(x, self.y[places], samples, self.index, 0, self.step)


class RoundLoader(Loader):
    """The workers of this rank's seats, in order, for each round: their rows are read while the round before trains."""

    @property
    def rounds(self) -> Rounds:
        assert isinstance(self.sampler, Rounds)
        return self.sampler

    def load(self, step: int) -> list[MicroBatch]:
        """The turns of a round on this rank. Raises DataError with the step."""
        rounds = self.rounds
        arrived = rounds.draw.arrived(step)
        weights, seated = rounds.weights(arrived), rounds.seated(len(arrived))
        return [self._turn(step, seat, int(arrived[place]), float(weights[place]))
                for seat in self.micro for place in seated[seat]]

    def _turn(self, step: int, seat: int, worker: int, weight: float) -> Turn:
        rounds = self.rounds
        rows, base = rounds.rows_of[worker], key(rounds.seed, "worker", worker, step)
        plan = rounds.local.batches(len(rows), base)
        if len(plan) * rounds.local.batch < len(rows):        # It will not see all of them.
            seen = np.unique(np.concatenate([places for _, places in plan]))
            plan = [(epoch, np.searchsorted(seen, places)) for epoch, places in plan]
            rows = rows[seen]
        try:
            x, y = self.reader.read(rows, step)
        except MpitrainError as error:
            error.step = step
            raise
        return Turn(x, y, rows, seat, 0, step, None, worker, weight, plan, base, self.augment)
