"""Samplers: the values of a new trial.

    random      independent and uniform in each dimension
    grid        all combinations; a range has `points` of them, evenly spaced in its scale. The last key changes fastest
    qmc         the points of the Sobol sequence, unscrambled, in its order
    evolution   regularised evolution (`search.evolution`)
    optuna:X    a sampler of Optuna (`search.optuna_sampler`)
    file.py:f   your own function

What a sampler draws is keyed by the study's seed and the trial's number, and all else that it knows is in the table: whoever
asks, and after whatever restart, gets the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.arguments import call
from mpitrain.errors import ConfigError
from mpitrain.registry import Registry
from mpitrain.search.sobol import LARGEST, sobol
from mpitrain.search.space import Dimension, Range, Space, Values
from mpitrain.search.table import Table

KEYS = 4                          # numbers of a Philox key of 128 bits, counted in 32


class Asked(NamedTuple):
    """A new trial's values, and what the sampler wants to be told again with its results."""

    values: Values
    attributes: Mapping[str, Any] = {}


class Sampler(Protocol):
    """Made as ``Sampler(space, seed, **arguments)`` of [search]."""

    def ask(self, table: Table, number: int) -> Asked: ...


SAMPLERS: Registry[Callable[..., Sampler]] = Registry("sampler")
SAMPLERS.register_later("evolution", "mpitrain.search.evolution:Evolution")


def draws(seed: int, number: int) -> np.random.Generator:
    """The random numbers of trial `number` of a study."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, number]))


def drawn(space: Space, seed: int, number: int) -> Values:
    """The values that random search gives trial `number`."""
    return space.at(draws(seed, number).random(len(space)).tolist())


@SAMPLERS.register("random")
class RandomSearch:
    """Uniform in each dimension's scale."""

    def __init__(self, space: Space, seed: int):
        self.space, self.seed = space, seed

    def ask(self, table: Table, number: int) -> Asked:
        return Asked(drawn(self.space, self.seed, number))


@SAMPLERS.register("grid")
class Grid:
    """Every combination once; `points` is the number of values of a range of real numbers."""

    def __init__(self, space: Space, seed: int, points: int = 5):
        if points < 1:
            raise ConfigError(f"search.points must be at least 1, found {points}")
        self.space, self.points = space, points

    def count(self, dimension: Dimension) -> int:
        return self.points if dimension.count is None else dimension.count

    def size(self) -> int:
        """The number of combinations."""
        return math.prod(self.count(dimension) for dimension in self.space.dimensions.values())

    def ask(self, table: Table, number: int) -> Asked:
        values = {}
        for key, dimension in reversed(list(self.space.dimensions.items())):
            number, place = divmod(number, self.count(dimension))
            values[key] = on_grid(dimension, place, self.count(dimension))
        return Asked({key: values[key] for key in self.space.dimensions})


def on_grid(dimension: Dimension, place: int, count: int) -> Any:
    """Value `place` of `count` of a dimension: from end to end of a range, the middle one where there is one alone."""
    if isinstance(dimension, Range):
        return dimension.at(place / (count - 1) if count > 1 else 0.5)
    return dimension.at((place + 0.5) / count)


@SAMPLERS.register("qmc")
class QuasiRandom:
    """The Sobol sequence from its first point, 0, on: trial n has point n."""

    def __init__(self, space: Space, seed: int):
        if len(space) > LARGEST:
            raise ConfigError(f'search.sampler = "qmc" has direction numbers for {LARGEST} keys, and [space] has {len(space)}; '
                              'take "random", or fewer keys')
        self.space = space

    def ask(self, table: Table, number: int) -> Asked:
        return Asked(self.space.at(sobol(len(self.space), number)))


class Own:
    """A function of the user's: ``f(space, history, number, seed)`` returns a value for each key of [space].

    `space` is the `Space`, `history` a list of tables with id, values, state, rung and results (by rung) of the trials so far,
    and `number` that of the new one. It should draw random numbers from `seed` and `number` alone.
    """

    def __init__(self, name: str, function: Callable[..., Any], space: Space, seed: int):
        self.what, self.function, self.space, self.seed = f'search.sampler "{name}"', function, space, seed

    def ask(self, table: Table, number: int) -> Asked:
        history = [{"id": t.id, "values": dict(t.values), "state": t.state, "rung": t.rung,
                    "results": {rung: dict(values) for rung, values in t.results.items()}} for t in table.trials]
        return Asked(self.space.refuse(call(self.function, self.what, {}, self.space, history, number, self.seed), self.what))
