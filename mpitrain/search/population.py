"""What a population decides: which member goes on with whose weights, and with what values. Pure; no MPI.

    pbt          population based training (Jaderberg et al. 2017, 1711.09846): after each `every` epochs the members of the
                 lowest `quantile` take the weights of one of the highest (exploit), and change their values a little (explore)
    tournament   pairs are drawn; both judge both models on tournament rows of their own, and where the two judgements agree that
                 one of the models is better, both go on with it (Jacobs et al. 2017, LTFB; LBANN)

What is drawn is a function of the study's seed, the round and the member.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpitrain.config import Config
from mpitrain.config.load import convert
from mpitrain.errors import ConfigError, nearest
from mpitrain.search.front import Score
from mpitrain.search.settings import SearchConfig
from mpitrain.search.space import Dimension, Range, Space, Steps, Values
from mpitrain.search.table import Rung

ROUNDS = 1 << 32                 # the draws of round r of member m are keyed by (r + 1) ROUNDS + m, those of a sampler by less


@dataclass(frozen=True)
class Exchange:
    """[search.exchange]."""

    every: int = 1                           # epochs between two exchanges
    rule: Literal["pbt", "tournament"] = "pbt"
    quantile: float = 0.25                   # of the members, that lose or win with "pbt": one at least
    factors: tuple[float, ...] = (0.8, 1.2)  # one of them multiplies a number of whoever takes another's weights
    resample: float = 0.25                   # how likely a value is drawn anew instead
    own_seed: bool = False                   # whether each member has a run.seed of its own: its first weights, order of rows


def exchange_of(search: SearchConfig) -> Exchange:
    """[search.exchange] as it is checked. ConfigError for a key that there is not, or an impossible value."""
    hints = typing.get_type_hints(Exchange)
    for key in search.exchange:
        if key not in hints:
            raise ConfigError(f"unknown key search.exchange.{key}{nearest(key, hints)}")
    found = Exchange(**{key: convert(f"search.exchange.{key}", value, hints[key]) for key, value in search.exchange.items()})
    rules = typing.get_args(hints["rule"])
    for key, wrong, expected in (
            ("every", found.every < 1, "1 or more epochs"),
            ("rule", found.rule not in rules, f"one of {', '.join(rules)}{nearest(str(found.rule), rules)}"),
            ("quantile", not 0 < found.quantile <= 0.5, "more than 0 and at most 0.5, so that nobody loses to himself"),
            ("factors", not all(0 < factor < float("inf") for factor in found.factors), "a list of numbers above 0"),
            ("resample", not 0 <= found.resample <= 1, "a probability")):
        if wrong:
            raise ConfigError(f"search.exchange.{key} must be {expected}, found {getattr(found, key)}")
    return found


def with_population(search: SearchConfig, base: Config) -> SearchConfig:
    """`search` with the rungs of its exchanges, and as many trials as it has members. ConfigError for what does not go with a
    population, or for [search.exchange] without one."""
    if not search.population:
        if search.exchange:
            raise ConfigError("[search.exchange] is of a population, and search.population is 0; set it to a number of members")
        return search
    found, n = exchange_of(search), search.population
    for wrong, what in (
            (n < 2, "search.population must have 2 members at least, or be 0"),
            (search.trials not in (0, n), f"search.trials = {search.trials} differs from search.population; leave it out"),
            (search.pruner not in ("asha", "none"), f'search.pruner = "{search.pruner}": nobody is pruned; leave it out'),
            (bool(search.rungs), "search.rungs is for pruners; search.exchange.every says after how many epochs members meet"),
            (search.order != "free", 'search.order = "fixed" is how it is always; leave it out'),
            (bool(base.stop.patience), f"stop.patience = {base.stop.patience} would end members at different steps; set it to 0"),
            (base.comm.node_shared, "comm.node_shared = true: several ranks would write one memory; set it to false"),
            (bool(base.comm.compress), f'comm.compress = "{base.comm.compress}": what ranks left out of messages is not '
             'exchanged; set it to ""'),
            (bool(base.workers.count), f"workers.count = {base.workers.count}: state of workers is not exchanged; set it to 0"),
            (base.mesh.site > 1 or bool(base.sync.levels), "sites have weights of their own; set mesh.site = 1"),
            (base.privacy.unit != "none", f'privacy.unit = "{base.privacy.unit}": who takes weights has not spent what they did; '
             'set it to "none"')):
        if wrong:
            raise ConfigError(f"a population (search.population = {n}): {what}")
    epochs = base.train.epochs
    rungs = (*range(found.every, epochs, found.every), epochs)
    return dataclasses.replace(search, trials=n, pruner="none", rungs=rungs)


def draws(seed: int, turn: int, member: int = 0) -> np.random.Generator:
    """The random numbers of a member in a round."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, (turn + 1) * ROUNDS + member]))


def exploit(scores: Mapping[int, Score | None], quantile: float, seed: int, turn: int,
            failed: Collection[int] = ()) -> dict[int, int]:
    """Who takes whose weights: the lowest quantile of the members, and all that have failed, each those of one drawn of the
    highest.

    Members without a score are the lowest; of equal ones, those with the higher number. With several objectives the order is that
    of fronts.
    """
    known = {member: score for member, score in sorted(scores.items()) if score is not None}
    rung = Rung(max(map(len, known.values()), default=1))
    for member, score in known.items():
        rung.add(member, score)
    ranked = [*rung.best(len(known)), *sorted(scores.keys() - known.keys())]
    n = min(max(1, int(quantile * len(ranked))), len(ranked) // 2)
    high, low = [member for member in ranked[:n] if scores[member] is not None], ranked[len(ranked) - n:]
    low += [member for member in sorted(failed) if member not in low]
    return {member: high[int(draws(seed, turn, member).random() * len(high))] for member in low} if high else {}


def explored(space: Space, values: Values, exchange: Exchange, seed: int, turn: int, member: int) -> Values:
    """Values a little off: each number times one of the factors, inside its range, or drawn anew; of a list, another choice."""
    random = draws(seed, turn, ROUNDS // 2 + member)
    found = {}
    for key, dimension in space.dimensions.items():
        anew, u, which = random.random(3)
        if anew < exchange.resample:
            found[key] = dimension.at(u)
        elif exchange.factors:
            found[key] = _scaled(dimension, values[key], exchange.factors[int(which * len(exchange.factors))], u)
        else:
            found[key] = values[key]
    return found


def _scaled(dimension: Dimension, value: object, factor: float, u: float) -> object:
    if isinstance(dimension, Range):
        return min(max(float(value) * factor, dimension.low), dimension.high)         # type: ignore[arg-type]
    if isinstance(dimension, Steps):
        steps = round((float(value) * factor - dimension.low) / dimension.step)       # type: ignore[arg-type]
        return dimension.low + dimension.step * min(max(steps, 0), dimension.count - 1)
    return dimension.mutated(value, u)


def pairs(members: Sequence[int], seed: int, turn: int) -> dict[int, int]:
    """The partner of each member in a round; of an odd number one has none."""
    order = [members[i] for i in draws(seed, turn).permutation(len(members))]
    found: dict[int, int] = {}
    for a, b in zip(order[::2], order[1::2]):
        found[a], found[b] = b, a
    return found


def winners(judged: Mapping[int, tuple[float, float] | None], partners: Mapping[int, int]) -> dict[int, int]:
    """Who takes whose weights, of how good each member has found its own model and its partner's; larger is better.

    Both must find the same one better: where each prefers the other's, an exchange would only change their places.
    """
    found: dict[int, int] = {}
    for member, partner in partners.items():
        mine, theirs = judged.get(member), judged.get(partner)
        if mine is not None and theirs is not None and mine[1] > mine[0] and theirs[0] > theirs[1]:
            found[member] = partner
    return found
