"""Samplers of Optuna, asked one trial at a time: ``search.sampler = "optuna:TPESampler"``. The extra mpitrain[search] has it.

Optuna decides nothing by what it remembers: for each trial a study in memory has everything that our journal knows, in Optuna's
words, and a new sampler that is seeded by the study's seed and the trial's number is asked. So whoever asks gets the same values,
after whatever restart. The words for a trial are made once for each state that it comes to.

A trial that has not reached the last rung is told as pruned, with its results by epochs; with several objectives, where Optuna
has no pruned trials, it is left out. What a sampler notes about a trial (CMA-ES its state, NSGA-II its generation) is kept in the
record of its start.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.arguments import call, call_with, parameters_of
from mpitrain.errors import ConfigError, nearest
from mpitrain.search.front import Objective
from mpitrain.search.samplers import Asked, draws
from mpitrain.search.space import Choices, Dimension, Range, Space, Steps
from mpitrain.search.table import FAILED, FINISHED, LOST, RUNNING, Table, Trial


class OptunaSampler:
    """One of ``optuna.samplers``, by the name of its class, with further keys of [search] as its arguments."""

    def __init__(self, name: str, space: Space, seed: int, objectives: Sequence[Objective], rungs: Sequence[int],
                 arguments: Mapping[str, Any]):
        try:
            self.optuna = importlib.import_module("optuna")
        except ImportError:
            raise ConfigError(f'search.sampler "optuna:{name}" needs Optuna: pip install "mpitrain[search]"') from None
        self.optuna.logging.set_verbosity(self.optuna.logging.ERROR)
        known = [one for one in self.optuna.samplers.__all__ if one.endswith("Sampler") and one != "BaseSampler"]
        if name not in known:
            raise ConfigError(f'unknown sampler of Optuna "{name}"{nearest(name, known)}')
        self.kind: Any = getattr(self.optuna.samplers, name)
        self.space, self.seed, self.objectives, self.rungs = space, seed, objectives, rungs
        self.what = f'search.sampler "optuna:{name}"'
        self.arguments = {key: value for key, value in arguments.items() if key in parameters_of(self.kind)}
        self.distributions = {key: self.distribution(key, d) for key, d in space.dimensions.items()}
        self.known: dict[int, tuple[tuple[Any, ...], Any]] = {}          # by trial: its state, and that in Optuna's words
        from mpitrain.search.optuna_storage import OneStudy  # an extra
        self.storage = OneStudy()
        directions = ["maximize"] * len(objectives)                      # scores are larger where a trial is better
        self.study = self.optuna.create_study(storage=self.storage, directions=directions, sampler=self.made(0))

    def made(self, number: int) -> Any:
        """The sampler, seeded for one trial."""
        seeded = {"seed": int(draws(self.seed, number).integers(2**31))} if "seed" in parameters_of(self.kind) else {}
        return call_with(self.kind, {**self.arguments, **seeded}, self.what, "search")

    def distribution(self, key: str, dimension: Dimension) -> Any:
        """A dimension in Optuna's words; choices that are lists or tables are told by their numbers."""
        kinds = self.optuna.distributions
        if isinstance(dimension, Range):
            return kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.log)
        if isinstance(dimension, Steps):
            return kinds.IntDistribution(dimension.low, dimension.ends()[1], step=dimension.step)
        assert isinstance(dimension, Choices)
        return kinds.CategoricalDistribution(tuple(range(dimension.count)))

    def ask(self, table: Table, number: int) -> Asked:
        self.study.sampler = self.made(number)
        self.storage.tell([told for trial in table.trials if (told := self.words(trial, table)) is not None])
        asked = call(self.study.ask, self.what, {}, self.distributions)       # some need packages that Optuna does not bring
        values = {key: self.value(key, asked.params[key]) for key in self.space.dimensions}
        return Asked(values, dict(self.storage.trials[-1].system_attrs))

    def words(self, trial: Trial, table: Table) -> Any:
        """What Optuna is told of a trial, made once for each state that it comes to; None where it has no word for it."""
        state, (known, words) = (trial, trial.state, trial.reached), self.known.get(trial.id, ((), None))
        if known != state:
            words = self.told(trial, table)
            self.known[trial.id] = state, words
        return words

    def value(self, key: str, found: Any) -> Any:
        dimension = self.space.dimensions[key]
        return dimension.values[found] if isinstance(dimension, Choices) else found

    def told(self, trial: Trial, table: Table) -> Any:
        """A trial as Optuna keeps them."""
        states = self.optuna.trial.TrialState
        params = {key: self.number(key, value) for key, value in trial.values.items()}
        single, values, between = len(self.objectives) == 1, None, dict[int, float]()
        if trial.state in (RUNNING, LOST) and not trial.results:
            state = states.RUNNING
        elif trial.state == FAILED or trial.score is None:
            state = states.FAIL
        elif trial.state == FINISHED:
            state, values = states.COMPLETE, list(trial.score)
        elif single:
            state = states.PRUNED
        else:
            return None
        if single:
            between = {table.epochs[i]: rung.scores[trial.id][0] for i, rung in enumerate(table.rungs) if trial.id in rung.scores}
        return self.optuna.trial.create_trial(state=state, values=values, params=params, distributions=self.distributions,
                                              intermediate_values=between, system_attrs=dict(trial.attributes))

    def number(self, key: str, value: Any) -> Any:
        dimension = self.space.dimensions[key]
        return dimension.values.index(value) if isinstance(dimension, Choices) else value
