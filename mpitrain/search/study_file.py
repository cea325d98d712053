"""A study file: a run file with two sections more, [search] and [space], read and checked before anything starts."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import gcd
from pathlib import Path
from typing import Any

from mpitrain.arguments import accepted, call, parameters_of
from mpitrain.config import Config
from mpitrain.config.load import config_of, read_tables
from mpitrain.config.messages import toml
from mpitrain.errors import CheckpointError, ConfigError, MpitrainError, nearest
from mpitrain.search.decisions import Decisions, FixedDecisions
from mpitrain.search.front import Objective
from mpitrain.search.pruners import PRUNERS, Median, Pruner
from mpitrain.search.samplers import SAMPLERS, Grid, Own, Sampler
from mpitrain.search.settings import (
    KEYS,
    SearchConfig,
    length_of,
    objectives_of,
    refuse_go_on,
    refuse_keys,
    search_of,
    unit_of,
    with_length,
    with_rungs,
)
from mpitrain.search.space import Space, read_space
from mpitrain.search.table import Table, Trial

__all__ = ["SearchConfig", "Study", "read_study"]

GIVEN = {"space", "seed", "eta", "name", "function"}      # parameters of samplers and pruners that are no keys of [search]
OPTUNA = "optuna:"


@dataclass(frozen=True)
class Study:
    """What a study file describes. `tables` are those of the run, with overrides, and without [search] and [space]."""

    file: Path
    tables: Mapping[str, Any]
    overrides: tuple[str, ...]
    search: SearchConfig
    space: Space
    base: Config                             # the run as it stands there, and first values of [space] for keys that it leaves out
    objectives: tuple[Objective, ...]

    @property
    def trials(self) -> int:
        return self.search.trials

    @property
    def rungs(self) -> tuple[int, ...]:
        """Epochs of each rung; of a federation rounds."""
        return self.search.rungs

    def steps_of(self, rung: int, steps_per_epoch: int) -> int:
        """The step at which a trial has reached a rung; a federation's rounds are its steps."""
        return self.rungs[rung] * (1 if self.base.workers.count else steps_per_epoch)

    @property
    def seed(self) -> int:
        return self.base.run.seed if self.search.seed < 0 else self.search.seed

    @property
    def folder(self) -> Path:
        """The study's: trials have theirs in it."""
        return Path(self.base.run.out)

    def trial_folder(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:04d}"

    def config(self, trial: Trial) -> Config:
        """The configuration of a trial, which runs to the last rung, in a folder of its own."""
        return self.config_with(trial.values, (f"run.name={toml(f'{self.base.run.name}-{trial.id:04d}')}",
                                               f"run.out={toml(str(self.trial_folder(trial.id)))}"))

    @cached_property
    def given(self) -> set[str]:
        """The keys that the run gives."""
        found = {override.partition("=")[0] for override in self.overrides}
        tables = {section: table for section, table in self.tables.items() if isinstance(table, Mapping)}
        return found | {f"{section}.{key}" for section, table in tables.items() for key in table}

    @cached_property
    def left_out(self) -> Mapping[str, Any]:
        """First values of those keys of [space] that the run does not give: a model may need them."""
        return {key: dimension.ends()[0] for key, dimension in self.space.dimensions.items() if key not in self.given}

    def config_with(self, values: Mapping[str, Any], more: tuple[str, ...] = ()) -> Config:
        """The run with these values for keys of [space]. ConfigError where they cannot stand there."""
        return self._config({**self.left_out, **values}, more)

    def as_written(self) -> Config:
        """The run without anything of [space]; it may lack what it needs."""
        return self._config({}, ())

    def _config(self, values: Mapping[str, Any], more: tuple[str, ...]) -> Config:
        chosen = [f"{key}={toml(value)}" for key, value in values.items()]
        length = [f"{length_of(self.base)}={self.rungs[-1]}"]
        if self.base.workers.count and "train.eval_every" not in self.given:      # its own default goes by workers.count
            length.append(f"train.eval_every={gcd(*self.rungs)}")
        folder = self.file.resolve().parent
        return config_of(copy.deepcopy(dict(self.tables)), [*self.overrides, *length, *chosen, *more], self.file, folder)

    @cached_property
    def sampler(self) -> Sampler:
        name, folder = self.search.sampler, self.base.folder
        what = f'search.sampler "{name}"'
        if name.startswith(OPTUNA):
            from mpitrain.search.optuna_sampler import OptunaSampler  # an extra
            return OptunaSampler(name.removeprefix(OPTUNA), self.space, self.seed, self.objectives, self.rungs,
                                 self.search.arguments)
        kind: Any = SAMPLERS.resolve(name, folder)
        if ":" in name:
            return Own(name, kind, self.space, self.seed)
        made: Sampler = call(kind, what, accepted(kind, self.search.arguments), self.space, self.seed, section="search")
        return made

    @cached_property
    def pruner(self) -> Pruner:
        name = self.search.pruner
        kind: Any = PRUNERS.resolve(name, self.base.folder)
        made: Pruner = call(kind, f'search.pruner "{name}"', accepted(kind, {"eta": self.search.eta, **self.search.arguments}),
                            section="search")
        return made

    def decisions(self) -> Decisions:
        """The table of a study that begins, with what decides on it."""
        table = Table(self.rungs, self.objectives, self.trials, unit_of(self.base))
        if self.search.order == "fixed":
            return FixedDecisions(table, self.pruner, self.sampler, self.search.ahead)
        return Decisions(table, self.pruner, self.sampler)

    def header(self) -> dict[str, Any]:
        """The first record of the journal: what must be the same for the study to go on, as hashes, and in words."""
        s = self.search
        how = {"ranks": s.ranks, "sampler": s.sampler, "pruner": s.pruner, "eta": s.eta, "rungs": list(s.rungs), "order": s.order,
               "objective": list(s.objective), "ahead": s.ahead if s.order == "fixed" else 0, "seed": self.seed,
               "population": s.population, "exchange": s.exchange, **s.arguments}
        if self.base.workers.count:
            how["unit"] = unit_of(self.base)
        space = {key: repr(dimension) for key, dimension in self.space.dimensions.items()}
        run = {name: table for name, table in self.tables.items() if name not in ("log", "checkpoint")}
        run["run"] = {key: value for key, value in run.get("run", {}).items() if key not in ("out", "name")}
        aside = ("run.out=", "run.name=", "log.", "checkpoint.")
        own = [override for override in self.overrides if not override.startswith(aside)]
        return {"trials": s.trials, "search": how, "higher": [one.higher for one in self.objectives], "digests": {
            "[space]": digest(space), "[search]": digest(how), "the run": digest([run, own])}}

    def refuse_other(self, header: Mapping[str, Any], journal: Path) -> None:
        """CheckpointError where a journal's header is that of another study. The number of trials may grow."""
        found = header.get("digests", {})
        for name, own in self.header()["digests"].items():
            if found.get(name) != own:
                raise CheckpointError(f"the journal is of another study: {name} of {self.file.name} has changed since; set "
                                      "run.out to another folder, or start anew with --overwrite", file=journal)
        if self.trials < int(header.get("trials", 0)):
            raise CheckpointError(f"the journal is of {header['trials']} trials, and search.trials is {self.trials}; more may be "
                                  "added, and none taken away", file=journal)


def digest(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def is_study(path: Path) -> bool:
    """Whether a file is a study; errors of reading it are as of `load_config`."""
    return "search" in read_tables(path)


def read_study(path: Path, overrides: list[str]) -> Study:
    """The study in `path` with ``section.key=value`` overrides on top, those of [search] among them.

    ConfigError for everything that is wrong with the file, the space, or the run at an end of a range or a choice.
    """
    tables = read_tables(path)
    if "search" not in tables:
        raise ConfigError("a study has a section [search], and this file has none; a single run is started with train", file=path)
    from mpitrain.search.population import with_population  # it knows what samplers draw from
    ours = [override for override in overrides if override.startswith("search.")]
    others = [override for override in overrides if override not in ours]
    try:
        search = search_of(tables.pop("search"), ours)
        space = read_space(tables.pop("space", None))
        refuse_keys(space.dimensions)
        tables = with_length(tables, search, others)
        base = config_of(copy.deepcopy(tables), others, path, path.resolve().parent)
        base.refuse_without_data()
        refuse_go_on(base)
        search = with_rungs(with_population(search, base), base)
        study = Study(path, tables, tuple(others), search, space, base, objectives_of(search, base))
        refuse_arguments(study)
        study = with_grid(study)
        refuse_ends(study, lambda config: None)
        study = dataclasses.replace(study, base=study.config_with({}))
    except ConfigError as error:
        raise error if error.file else ConfigError(error.message, code=error.code, file=path) from None
    return study


def refuse_arguments(study: Study) -> None:
    """ConfigError for further keys of [search] that neither the sampler nor the pruner takes; makes both."""
    kinds = [getattr(study.sampler, "kind", type(study.sampler)), type(study.pruner)]
    taken = {name for kind in kinds for name in parameters_of(kind)} - GIVEN
    for key in study.search.arguments:
        if key not in taken:
            raise ConfigError(f"unknown key search.{key}{nearest(key, {*taken, *KEYS})}")
    if not callable(getattr(study.pruner, "decide", None)):
        raise ConfigError(f'search.pruner = "{study.search.pruner}" has no method decide(table), which says what is next; see '
                          "mpitrain/search/pruners.py")
    if isinstance(study.pruner, Median) and len(study.objectives) > 1:
        raise ConfigError('search.pruner = "median" compares single numbers, found several objectives; take "asha", for instance')


def with_grid(study: Study) -> Study:
    """`study` with as many trials as its grid has points, where it does not say a number; ConfigError for more."""
    if not isinstance(study.sampler, Grid):
        return study
    points = study.sampler.size()
    if study.trials > points:
        raise ConfigError(f"search.trials = {study.trials}, and the grid has {points} points; leave search.trials out for all of "
                          "them")
    return dataclasses.replace(study, search=dataclasses.replace(study.search, trials=study.trials or points))


def refuse_ends(study: Study, look: Callable[[Config], object]) -> None:
    """ConfigError where `look` refuses the run at an end of a range or with a choice of [space], and names that."""
    for key, value in study.space.ends():
        try:
            look(study.config_with({key: value}))
        except MpitrainError as error:
            raise ConfigError(f'[space] "{key}" = {toml(value)}: {error.message.removeprefix("on the command line: ")}',
                              code=error.code, file=study.file) from None


def refuse_unbuildable(study: Study, inputs: Any) -> None:
    """ConfigError where model, loss, optimizer or schedule cannot be made at an end of a range or with a choice; `inputs` are the
    open data. Needs no MPI, and allocates nothing."""
    from mpitrain.placement.shard_cuts import probe
    from mpitrain.train.build.from_config import describe
    from mpitrain.train.build.sizes import with_sizes

    def build(config: Config) -> None:
        made = describe(with_sizes(config, inputs), inputs.tokens, inputs)
        made.optimizer(probe())
        made.rate(study.rungs[-1])
    try:
        build(study.base)
    except MpitrainError as error:
        if not study.left_out or said(build, study.as_written()) == error.message:
            raise                                 # what is wrong with the run is not the fault of [space]
    refuse_ends(study, build)


def said(look: Callable[[Config], object], config: Config) -> str:
    """What `look` refuses a configuration with; "" where it does not."""
    try:
        look(config)
    except MpitrainError as error:
        return error.message
    return ""
