"""What a population refuses before it begins: members that would be unlike, and could not exchange their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.config import Config
from mpitrain.config.messages import toml
from mpitrain.errors import ConfigError, MeshError
from mpitrain.placement.shard_cuts import probe
from mpitrain.search.groups import Groups
from mpitrain.search.population import exchange_of
from mpitrain.search.study_file import Study
from mpitrain.train.build.from_config import describe
from mpitrain.train.build.sizes import with_sizes


def refuse_ranks(study: Study, groups: Groups) -> None:
    """MeshError unless each member has a group."""
    n, each, have = study.search.population, study.search.ranks, groups.count * study.search.ranks
    if groups.count != n:
        raise MeshError(f"search.population = {n} x search.ranks = {each} needs {n * each} ranks, but mpirun started {have}; "
                        f"set search.population = {groups.count} or run with -n {n * each}")


def refuse_unlike(study: Study, inputs: Any) -> None:
    """ConfigError for a key of [space] that would give members other arrays, rows or lengths, so that they could not exchange
    their weights; and for a tournament of what is no metric."""
    base = _likeness(study.base, inputs)
    for key, value in study.space.ends():
        for what, (own, other) in _differences(base, _likeness(study.config_with({key: value}), inputs)).items():
            raise ConfigError(f'[space] "{key}" = {toml(value)}: members of a population exchange their weights, and {what} '
                              f"would be {other} there, {own} in the run as it stands; take the key out of [space]",
                              file=study.file)
    exchange, objective = exchange_of(study.search), study.objectives[0]
    if exchange.rule == "tournament" and (objective.text.startswith("-") or inputs.validation is None):
        raise ConfigError(f'search.exchange.rule = "tournament" judges by a metric on validation rows, found objective '
                          f'"{objective.text}"; name a metric first, and set data.validation', file=study.file)


def _likeness(config: Config, inputs: Any) -> dict[str, Any]:
    """What members have alike: the lengths of their runs, the rows of each step, the shapes of all state."""
    config = with_sizes(config, inputs)
    made, t = describe(config, inputs.tokens, inputs), config.train
    optimizer = made.optimizer(probe())
    return {"train.batch_size": t.batch_size, "train.micro_batches": t.micro_batches, "train.precision": t.precision,
            "run.seed": config.run.seed, "the model": type(made.model).__name__,
            **{f'the shape of "{name}"': list(leaf.shape)
               for name, leaf in (*made.model.named_parameters(), *made.model.named_buffers())},
            "the optimizer's state": [optimizer.title, *optimizer.state]}


def _differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (own.get(name), other.get(name)) for name in dict.fromkeys((*own, *other)) if own.get(name) != other.get(name)}
