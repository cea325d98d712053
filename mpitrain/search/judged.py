"""Choices of [space] that no trial could have are refused before the first trial, as `inspect` would refuse them.

A choice is judged in the run as it stands, without MPI. Where it is refused there, the other values of [space] may be to blame,
or may mend it: each end and each choice of theirs is tried beside it, and some points drawn from the whole space. An error that
does not change by one word with any of them is the own one of the choice. What depends on shapes, memory or the mesh is left to
the trials.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpitrain.config.messages import toml
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.plan.prepare import grid_of, prepare
from mpitrain.search.samplers import drawn
from mpitrain.search.space import Choices, Values
from mpitrain.search.study_file import Study
from mpitrain.train.build.sizes import with_sizes

DRAWN = 8                      # points of the whole space: keys that only fit each other are not tried by ends alone


def tried(study: Study) -> Iterator[Values]:
    """The values that an error is tried with, where the run has one: each end and choice by itself, then points of the space."""
    for key, value in study.space.ends():
        yield {key: value}
    for number in range(DRAWN):
        yield drawn(study.space, study.seed, number)


def refuse_choices(study: Study, inputs: Any) -> None:
    """ConfigError for the first choice that config rules refuse whatever the other values are; `inputs` are the open data."""
    own = refusal(study, {}, inputs)                          # of the run, which is told as such
    for key, dimension in study.space.dimensions.items():
        for value in dimension.values if isinstance(dimension, Choices) else ():
            error = refusal(study, {key: value}, inputs)
            if error is None or error.code != ConfigError.code:
                continue
            others = ({**other, key: value} for other in tried(study))
            if not _same(error, own) and all(_same(error, refusal(study, other, inputs)) for other in others):
                raise ConfigError(f'[space] "{key}" = {toml(value)}: {error.message}; no trial with it could begin',
                                  code=error.code, file=study.file)


def refusal(study: Study, values: Values, inputs: Any) -> MpitrainError | None:
    """What a run of these values is refused with on a trial's ranks, as far as can be told without MPI and without memory."""
    try:
        config = study.config_with(values)
        prepare(with_sizes(config, inputs), grid_of(config, study.search.ranks), inputs)
    except MpitrainError as error:
        return error
    return None


def _same(error: MpitrainError, other: MpitrainError | None) -> bool:
    return other is not None and (error.code, error.message) == (other.code, other.message)
