"""Regularised evolution (Real et al., 1802.01548): of the youngest trials, a few are drawn, and the best of them is mutated.

A population of `parents` is random; after it, each trial mutates one key of the best of `tournament` trials drawn from the last
`parents` that have told a result. A trial dies of age, not of its score. Trials are compared by the rung that they reached, and
then by their score, with several objectives by fronts. Results are used as they come, so no rank waits for a generation.
"""

from __future__ import annotations

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.search import front
from mpitrain.search.samplers import Asked, drawn, draws
from mpitrain.search.space import Space, Values
from mpitrain.search.table import Table, Trial, point_text

TRIES = 32                        # mutations that are drawn until one is new


class Evolution:
    """One mutation is one key with another value: a neighbour in a range, another choice of a list."""

    def __init__(self, space: Space, seed: int, parents: int = 50, tournament: int = 10):
        if parents < 1 or not 1 <= tournament <= parents:
            raise ConfigError("search.parents must be at least 1, and search.tournament from 1 to it, found "
                              f"parents = {parents} and tournament = {tournament}")
        self.space, self.seed, self.parents, self.tournament = space, seed, parents, tournament

    def ask(self, table: Table, number: int) -> Asked:
        young = [table.trials[i] for i in table.told[-self.parents:]]
        able = [trial for trial in young if trial.score is not None]
        if number < self.parents or not able:
            return Asked(drawn(self.space, self.seed, number))
        random = draws(self.seed, number)
        some = random.permutation(len(able))[:self.tournament]
        parent = best_of([able[i] for i in sorted(some)])
        for _ in range(TRIES):
            child = self.mutated(parent.values, random)
            if point_text(child) not in table.asked:
                break
        return Asked(child)

    def mutated(self, values: Values, random: np.random.Generator) -> Values:
        keys = [key for key, dimension in self.space.dimensions.items() if dimension.count != 1]
        if not keys:
            return dict(values)
        key = keys[int(random.random() * len(keys))]
        return {**values, key: self.space.dimensions[key].mutated(values[key], random.random())}


def best_of(trials: list[Trial]) -> Trial:
    """The best trial of those with a score: of the highest rung reached, then by score, then the first."""
    highest = max(trial.reached for trial in trials)
    there = [trial for trial in trials if trial.reached == highest]
    return there[front.best_of([trial.score for trial in there if trial.score is not None])]
