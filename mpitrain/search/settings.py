"""[search] of a study file: its keys, their types, and what may stand there."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import gcd
from typing import Any, Literal

from mpitrain.config import Config
from mpitrain.config.load import convert
from mpitrain.config.sections import SECTIONS
from mpitrain.errors import ConfigError, nearest
from mpitrain.search.front import COSTS, Objective

# What a trial, or the study itself, decides: keys that [space] may not name, by section; () is a whole section.
FORBIDDEN: dict[str, tuple[str, ...]] = {"data": ("path", "x", "y", "validation"), "run": (), "mesh": (), "checkpoint": (),
                                         "train": ("epochs", "steps", "on_lost"),
                                         "energy": ("root", "cap_watts", "clock_mhz", "gpu_cap_watts")}      # of whole hosts


@dataclass(frozen=True)
class SearchConfig:
    """[search]; further keys are arguments of the sampler and the pruner."""

    trials: int = 0                          # configurations that are started; 0, with "grid": all
    ranks: int = 1                           # of a trial; [mesh] says how they are used
    sampler: str = "random"
    pruner: str = "asha"
    eta: int = 3                             # one of eta goes on at each rung
    rungs: tuple[int, ...] = ()              # epochs, or rounds, after which trials are compared; the last is the run's end
    objective: tuple[str, ...] = ("accuracy",)
    order: Literal["free", "fixed"] = "free"
    ahead: int = 8                           # order = "fixed": jobs that are decided before the first of them has ended
    seed: int = -1                           # of the sampler; -1: run.seed
    population: int = 0                      # more than 0: trials train side by side, and exchange weights
    exchange: dict[str, Any] = field(default_factory=dict)               # of a population
    arguments: dict[str, Any] = field(default_factory=dict)


KEYS = {name: hint for name, hint in typing.get_type_hints(SearchConfig).items() if name != "arguments"}
LEAST = {"trials": 0, "ranks": 1, "eta": 2, "ahead": 1, "seed": -1, "population": 0}


def search_of(table: Any, overrides: Iterable[str] = ()) -> SearchConfig:
    """[search] with ``search.key=value`` overrides on top. ConfigError for a key of the wrong type or an impossible value."""
    if not isinstance(table, dict):
        raise ConfigError(f"[search] must be a table of keys, found {json.dumps(table, default=str)}")
    table = dict(table)
    for override in overrides:
        name, _, text = override.removeprefix("search.").partition("=")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text                     # a bare word is a string
        key, dot, inner = name.partition(".")
        table[key] = {**dict(table.get(key, {})), inner: value} if dot else value
    values: dict[str, Any] = {key: convert(f"search.{key}", value, KEYS[key]) for key, value in table.items() if key in KEYS}
    search = SearchConfig(**values, arguments={key: value for key, value in table.items() if key not in KEYS})
    for key, least in LEAST.items():
        if getattr(search, key) < least:
            raise ConfigError(f"search.{key} must be at least {least}, found {getattr(search, key)}")
    if search.trials == 0 and search.sampler != "grid" and not search.population:
        raise ConfigError('search.trials is missing: the number of configurations to try; sampler = "grid" alone has a number of '
                          "its own")
    if search.order not in (orders := typing.get_args(KEYS["order"])):
        raise ConfigError(f'search.order must be one of {", ".join(orders)}, found "{search.order}"')
    if any(b <= a for a, b in zip((0, *search.rungs), search.rungs)):
        raise ConfigError(f"search.rungs must be numbers of epochs that rise from 1 on (in a federation, of rounds), found "
                          f"{list(search.rungs)}")
    return search


def refuse_go_on(base: Config) -> None:
    """ConfigError where trials would go on without a lost rank: a group of fewer ranks trains other bits, and other groups wait
    for ranks that are gone."""
    if base.train.on_lost != "stop":
        raise base.wrong(f'train.on_lost = "{base.train.on_lost}" would leave a group with fewer ranks; set it to "stop": a '
                         "study that has lost a rank goes on with --resume", ("train.on_lost",))


def length_of(base: Config) -> str:
    """The key that says how long a run is: in epochs, or in the rounds of a federation."""
    return "train.steps" if base.workers.count else "train.epochs"


def unit_of(base: Config) -> str:
    """What rungs count."""
    return "rounds" if base.workers.count else "epochs"


def with_length(tables: dict[str, Any], search: SearchConfig, overrides: Iterable[str]) -> dict[str, Any]:
    """The tables of a run whose file says no length: its epochs, or a federation's rounds, are those of the last rung."""
    train, given, workers = tables.get("train", {}), list(overrides), tables.get("workers", {})
    said = isinstance(train, dict) and {"epochs", "steps"} & train.keys()
    if said or not search.rungs or any(override.startswith(("train.epochs=", "train.steps=")) for override in given):
        return tables
    federated = isinstance(workers, dict) and workers.get("count") or any(one.startswith("workers.count=") for one in given)
    return {**tables, "train": {**train, "steps" if federated else "epochs": search.rungs[-1]}}


def with_rungs(search: SearchConfig, base: Config) -> SearchConfig:
    """`search` with rungs that end at the run's epochs or rounds; ConfigError where they do not, or no evaluation is at one."""
    key, unit = length_of(base), unit_of(base)
    if base.train.epochs and base.workers.count:
        raise base.wrong(f"train.epochs = {base.train.epochs}: a federation's length is its rounds, and rungs count these; set "
                         "train.steps to the last rung", ("train.epochs",))
    if base.train.steps and not base.workers.count:
        raise base.wrong("a study counts epochs, and train.steps gives the run's length in steps; set train.epochs (a "
                         "federation, with workers.count in the run, has train.steps)", ("train.steps",))
    length = base.train.steps or base.train.epochs
    rungs = search.rungs or (length,)
    if not rungs[-1]:
        raise base.wrong("a trial trains for an epoch at least, found train.epochs = 0", ("train.epochs",))
    if rungs[-1] > length:
        raise base.wrong(f"search.rungs ends at {rungs[-1]} {unit}, beyond {key} = {length}; the last rung is {key}", (key,))
    if rungs[-1] < length:
        raise base.wrong(f"search.rungs ends at {rungs[-1]} {unit}, and {key} = {length} is the last rung; add {length}, "
                         f"or set {key} = {rungs[-1]}", (key,))
    every = base.train.eval_every
    if base.workers.count and every and any(rung % every for rung in rungs[:-1]):
        raise base.wrong(f"trials are compared after {', '.join(map(str, rungs))} rounds, and train.eval_every = {every} "
                         f"evaluates after others; leave it out, or set it to {gcd(*rungs[:-1])}", ("train.eval_every",))
    return dataclasses.replace(search, rungs=rungs)


def objectives_of(search: SearchConfig, base: Config) -> tuple[Objective, ...]:
    """What search.objective names. ConfigError for what neither an evaluation nor a trial's cost gives."""
    from mpitrain.metrics import find_metrics, judged
    from mpitrain.train.build.from_config import make_loss
    kind = make_loss(base, False).kind
    metrics, found = find_metrics(base.train.metrics, base.folder), list[Objective]()
    for text in search.objective:
        name = text.removeprefix("-")
        if name in COSTS and not text.startswith("-"):
            raise ConfigError(f'search.objective: less of {name} is better; write "-{name}"')
        if text.startswith("-") and name not in COSTS:
            raise ConfigError(f'search.objective = "{text}": a minus is of costs, {", ".join(f"-{cost}" for cost in COSTS)}, and '
                              f'metrics know their direction; write "{name}"')
        name, higher = (name, False) if name in COSTS else judged("search.objective", name, metrics, kind)
        if name in (other.name for other in found):
            raise ConfigError(f'search.objective has "{text}" twice')
        found.append(Objective(name, higher))
    if not found:
        raise ConfigError('search.objective is empty: ["accuracy"], for instance')
    if not base.data.validation:
        raise base.wrong(f"trials are compared at evaluations, and data.validation = {base.data.validation} gives none; set it "
                         "to a share of the rows, such as 0.2", ("data.validation",))
    return tuple(found)


def refuse_keys(keys: Iterable[str]) -> None:
    """ConfigError for the first key of [space] that is no section.key, of an unknown section, or forbidden."""
    for key in keys:
        section, dot, name = key.partition(".")
        if not (dot and name) or "." in name:
            raise ConfigError(f'[space] "{key}" must be a key of the run, "section.key", for instance "optimizer.lr"')
        if section not in SECTIONS:
            raise ConfigError(f'[space] "{key}": unknown section [{section}]{nearest(section, SECTIONS)}')
        if section in FORBIDDEN and (not FORBIDDEN[section] or name in FORBIDDEN[section]):
            raise ConfigError(f'[space] "{key}": it is the same for all trials of a study, or each has its own; take it out of '
                              "[space]")
