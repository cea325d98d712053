"""Lower clocks for the stages of a plan, from a table of clocks: what `mpitrain plan --energy TABLE.csv` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Protocol

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.schedules.clocks import Table, stages_in
from mpitrain.schedules.pipeline_check import find_schedule
from mpitrain.schedules.slack import Pipeline, front_of, lines_of


class Candidate(Protocol):
    """What of the planner's `Candidate` matters here. `micro_batches` are those of each data-parallel rank."""

    @property
    def mesh(self) -> Mapping[str, int]: ...
    @property
    def schedule(self) -> str: ...
    @property
    def chunks(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...


def energy_lines(config: Config, candidate: Candidate, idle_watts: float, clocks: Table, file: Path, *,
                 message: float = 0.0) -> Iterator[str]:
    """The front of time and energy of a candidate's step, with joules of all its ranks and of a sample. A rank whose stage waits
    draws `idle_watts` (a machine file's), and a message between stages takes `message` seconds.

    ConfigError for a candidate of other stages than the table of clocks, read from `file`, has.
    """
    pp = candidate.mesh["pp"]
    if pp * candidate.chunks != stages_in(clocks):
        stages = f"{pp} stage{'s' * (pp > 1)}" + (f" of {candidate.chunks} chunks" if candidate.chunks > 1 else "")
        raise ConfigError(f"this table has clocks of {stages_in(clocks)} stages, and the plan has {stages}; profile the stages "
                          "of this plan, or set mesh.pp to the table's", file=file)
    schedule = find_schedule(candidate.schedule, config.folder, n_stages=pp, n_micro=candidate.micro_batches,
                             chunks=candidate.chunks)
    pipeline = Pipeline(clocks, schedule, pp, candidate.micro_batches, candidate.chunks, message=message, idle_watts=idle_watts)
    yield from lines_of(front_of(pipeline), pipeline, config.train.batch_size, prod(candidate.mesh.values()) // pp)
