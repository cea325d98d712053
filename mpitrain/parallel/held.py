"""What a rank of a mesh holds of a model, and the channels to those that hold the same part, or the other parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mpitrain.comm.channel import Channel
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ConfigError
from mpitrain.nn import FlatStorage, Module, Sequential
from mpitrain.parallel.neighbours import Neighbours
from mpitrain.parallel.stages import Stage, can_be_cut, cut
from mpitrain.parallel.twins import Twins
from mpitrain.schedules.pipeline import SCHEDULES, Schedule
from mpitrain.schedules.pipeline_check import check_pipeline


@dataclass
class Held:
    """A rank's part of the model. `replicas` connects the ranks that hold the same, `parts` those that hold one model together
    (None where each holds all of it)."""

    mesh: Mesh
    control: Channel
    stage: Stage
    replicas: Channel
    parts: Channel | None = None
    neighbours: Neighbours | None = None
    choices: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Whether this is the one rank that counts what its pipeline puts out."""
        return self.stage.is_last and self.mesh.coordinate("tp") == 0

    def schedule(self, asked: Any, n_micro: int) -> Schedule:
        """The pipeline schedule that is asked for, by name or as a function, proved for what ranks have of micro-batches."""
        found: Schedule = asked if callable(asked) else SCHEDULES.resolve(asked)
        n = self.mesh.size("dp")
        if self.stage.n_stages > 1:
            for count in {(rank + 1) * n_micro // n - rank * n_micro // n for rank in range(n)}:
                check_pipeline(found, self.stage.n_stages, count, len(self.stage.chunks))
        return found

    def twins(self, storage: FlatStorage) -> Twins | None:
        """What adds up the gradients of twins; None where there are none. It communicates."""
        if not any(parameter.twin_of for parameter in self.stage.whole.parameters()):
            return None
        return Twins(storage, self.mesh.link("pp", "twins"), self.mesh.channel("pp", "twins"), self.stage.place)

    def of_the_last(self, value: Any) -> tuple[Any, ...]:
        """What the ranks that hold the model's last block have, as a tuple, on all."""
        if self.stage.n_stages == 1:
            return tuple(value)
        last = self.mesh.size("dp") * self.mesh.size("tp") * (self.stage.n_stages - 1)       # its rank: pp is the outermost axis
        return tuple(self.control.broadcast_object(list(value) if value is not None else None, last))


def hold(model: Module, mesh: Mesh, control: Channel, *, chunks: int = 1, stages: Any = "blocks", untie: bool = False) -> Held:
    """Cuts `model`, which has no memory yet, as the mesh says. `untie` gives shared parameters twins also where nothing is cut.

    `stages` is "blocks" (about as many on each), each virtual stage's number of blocks, or a function of the model that gives
    these. Raises MeshError and ConfigError, alike on all ranks, where the model cannot be cut so. It communicates.
    """
    n_stages = mesh.size("pp")
    if chunks > 1 and n_stages == 1:
        raise ConfigError(f"mesh.chunks = {chunks} cuts the model for the stages of a pipeline, and mesh.pp is 1; set "
                          "mesh.chunks = 1, or mesh.pp to 2 or more")
    if (untie or n_stages > 1) and isinstance(model, Sequential):
        model.untie()
    if callable(stages):
        stages = stages(model) if n_stages > 1 and can_be_cut(model, n_stages * chunks) else ()
    counts = stages if isinstance(stages, (list, tuple)) else ()
    stage = cut(model, mesh.coordinate("pp"), n_stages, chunks, counts=counts)
    if n_stages == 1 and mesh.size("tp") == 1:
        return Held(mesh, control, stage, control)
    held = Held(mesh, control, stage, mesh.channel("dp", "replicas"), mesh.channel(("pp", "tp"), "parts"))
    if n_stages > 1:
        held.neighbours = Neighbours(mesh.link("pp", "stages"), stage)
        for chunk in stage.chunks:
            if isinstance(chunk, Sequential):
                chunk.between = mesh.progress.progress
        held.choices["stages"] = stage.bounds
    return held
