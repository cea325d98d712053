"""Order of trials by several objectives: fronts of non-dominated scores, and within a front the crowding distance.

A score is a tuple of numbers of which larger ones are better; `Objective` makes one of what a trial has measured. Fronts and
crowding distance are those of NSGA-II (Deb et al. 2002). With one objective the order is that of the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Score = tuple[float, ...]
COSTS = ("ms", "J", "parameters", "flops")        # what a search can save; everything else is a metric of evaluations


@dataclass(frozen=True)
class Objective:
    """What a trial is judged by: `name` is the key of its results, and `higher` whether more of it is better."""

    name: str
    higher: bool

    @property
    def text(self) -> str:
        """How a study file writes it: costs have a minus."""
        return f"-{self.name}" if self.name in COSTS else self.name


def score_of(values: Mapping[str, Any], objectives: Sequence[Objective]) -> Score | None:
    """The score of a trial's results; None where one of them is not a finite number."""
    found = [values.get(o.name) for o in objectives]
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in found):
        return None
    return tuple(float(value) if o.higher else -float(value) for o, value in zip(objectives, found) if value is not None)


class Ranking:
    """Scores that are added one by one, and their fronts. One dominates another that is nowhere larger and somewhere smaller."""

    def __init__(self, objectives: int):
        self.n = 0
        self.scores = np.empty((16, objectives))
        self.dominates = np.zeros((16, 16), dtype=bool)       # [i, j]: whether score i dominates j
        self.above = np.zeros(16, dtype=np.int32)             # how many dominate each

    def add(self, score: Score) -> None:
        n = self.n
        if n == len(self.above):
            self._grow()
        new, others = np.array(score), self.scores[:n]
        no_smaller, no_larger = (new >= others).all(axis=1), (new <= others).all(axis=1)
        self.dominates[n, :n] = no_smaller & ~no_larger
        self.dominates[:n, n] = no_larger & ~no_smaller
        self.above[:n] += self.dominates[n, :n]
        self.above[n] = np.count_nonzero(self.dominates[:n, n])
        self.scores[n] = new
        self.n += 1

    def _grow(self) -> None:
        n = len(self.above)
        self.scores = np.concatenate([self.scores, np.empty_like(self.scores)])
        self.above = np.concatenate([self.above, np.zeros_like(self.above)])
        dominates = np.zeros((2 * n, 2 * n), dtype=bool)
        dominates[:n, :n] = self.dominates
        self.dominates = dominates

    def fronts(self, wanted: int | None = None) -> list[NDArray[np.int64]]:
        """The numbers of the scores by fronts, the best first: none of a front is dominated by one of it or of a later one.
        As many fronts as have at least `wanted` scores (default: all)."""
        above, dominates = self.above[:self.n].copy(), self.dominates[:self.n, :self.n]
        found, left = list[NDArray[np.int64]](), self.n if wanted is None else min(wanted, self.n)
        while left > 0:
            front = np.flatnonzero(above == 0)
            above -= np.add.reduce(dominates[front], axis=0, dtype=np.int32)
            above[front] = -1
            found.append(front)
            left -= len(front)
        return found

    def best(self, n: int) -> list[int]:
        """The numbers of the best `n` scores: whole fronts as they came, and of the one that does not fit the least crowded."""
        found: list[int] = []
        for front in self.fronts(n):
            room = n - len(found)
            if len(front) > room:
                front = front[np.argsort(-crowding(self.scores[front]), kind="stable")[:room]]
            found += front.tolist()
        return found


def fronts(scores: Sequence[Score]) -> list[list[int]]:
    """The indices of `scores` by fronts, as `Ranking.fronts` has them."""
    ranking = Ranking(len(scores[0]) if scores else 1)
    for score in scores:
        ranking.add(score)
    return [front.tolist() for front in ranking.fronts()]


def crowding(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The crowding distance of each score of a front, (n, objectives): the sides of the box between its neighbours, as parts of
    the front's extent, summed; infinite at the ends."""
    distance = np.zeros(len(scores))
    for column in scores.T:
        order = np.argsort(column, kind="stable")
        sorted_ = column[order]
        if (extent := sorted_[-1] - sorted_[0]) > 0:
            distance[order[1:-1]] += (sorted_[2:] - sorted_[:-2]) / extent
        distance[order[[0, -1]]] = math.inf
    return distance


def best_of(scores: Sequence[Score]) -> int:
    """The index of the best score: the largest, the first of several; with several objectives the least crowded of the front."""
    if len(scores[0]) == 1:
        return max(range(len(scores)), key=lambda i: (scores[i], -i))
    ranking = Ranking(len(scores[0]))
    for score in scores:
        ranking.add(score)
    return ranking.best(1)[0]
