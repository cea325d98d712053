"""Lower clocks for the stages of a plan, from a table of clocks: what `mpitrain plan --energy TABLE.csv` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Protocol

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.schedules.clocks import read_table, stages_in
from mpitrain.schedules.pipeline_check import find_schedule
from mpitrain.schedules.slack import Pipeline, front_of, lines_of


class Piped(Protocol):
    """What of a plan's candidate matters here. `micro_batches` are those of each data-parallel rank."""

    @property
    def mesh(self) -> Mapping[str, int]: ...
    @property
    def schedule(self) -> str: ...
    @property
    def chunks(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...


def energy_lines(config: Config, plan: Piped, idle_watts: float, table: Path, message: float = 0.0) -> Iterator[str]:
    """The front of time and energy of a step of `plan`, with joules of all ranks and of a sample. A rank of a stage that waits
    draws `idle_watts`, and a message between stages takes `message` seconds.

    ConfigError for a plan without a pipeline, or of other stages than the table has; DataError for a table that is damaged.
    """
    pp, clocks = plan.mesh["pp"], read_table(table)
    if pp * plan.chunks != stages_in(clocks):
        stages = f"{pp} stages" + (f" of {plan.chunks} chunks" if plan.chunks > 1 else "")
        raise ConfigError(f"this table has clocks of {stages_in(clocks)} stages, and the plan has {stages}; profile the stages of "
                          "this plan, or set mesh.pp to the table's", file=table)
    schedule = find_schedule(plan.schedule, config.folder, n_stages=pp, n_micro=plan.micro_batches, chunks=plan.chunks)
    pipeline = Pipeline(clocks, schedule, pp, plan.micro_batches, plan.chunks, message=message, idle_watts=idle_watts)
    ranks = prod(plan.mesh.values()) // pp
    yield from lines_of(front_of(pipeline), pipeline, config.train.batch_size, ranks)
