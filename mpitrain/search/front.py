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


def fronts(scores: Sequence[Score], wanted: int | None = None) -> list[list[int]]:
    """The indices of `scores` by fronts, the best first: nobody in a front is dominated by one of it or of a later one.

    At least `wanted` scores are sorted (default: all). A score dominates another that is nowhere larger and somewhere smaller.
    """
    table = np.array(scores, dtype=np.float64).reshape(len(scores), -1)
    no_smaller = np.ones((len(table), len(table)), dtype=bool)
    larger = np.zeros_like(no_smaller)
    for column in table.T:
        no_smaller &= column[:, None] >= column[None, :]
        larger |= column[:, None] > column[None, :]
    dominates = no_smaller & larger
    above = dominates.sum(axis=0, dtype=np.int64)             # how many dominate each; those sorted already do not count
    found: list[list[int]] = []
    left = len(table) if wanted is None else min(wanted, len(table))
    while left > 0:
        front = np.flatnonzero(above == 0)
        above -= dominates[front].sum(axis=0, dtype=np.int64)
        above[front] = -1
        found.append([int(i) for i in front])
        left -= len(front)
    return found


def crowding(scores: Sequence[Score]) -> NDArray[np.float64]:
    """The crowding distance of each score of a front: the sides of the box between its neighbours, as parts of the front's
    extent, summed; infinite at the ends."""
    table = np.array(scores, dtype=np.float64).reshape(len(scores), -1)
    distance = np.zeros(len(table))
    for column in table.T:
        order = np.argsort(column, kind="stable")
        extent = column[order[-1]] - column[order[0]]
        if extent > 0:
            distance[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / extent
        distance[order[[0, -1]]] = math.inf
    return distance


def order(scores: Sequence[Score], wanted: int | None = None) -> list[int]:
    """The indices of `scores`, the best first; equal ones stay in their order. The first `wanted` at least (default: all)."""
    if not scores:
        return []
    if len(scores[0]) == 1:
        return sorted(range(len(scores)), key=lambda i: (-scores[i][0], i))
    found: list[int] = []
    for front in fronts(scores, wanted):
        apart = crowding([scores[i] for i in front])
        found += [front[i] for i in sorted(range(len(front)), key=lambda i: (-apart[i], front[i]))]
    return found
