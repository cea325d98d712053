"""What a rank of a mesh holds of a model, and the channels to those that hold the same part, or the other parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from mpitrain.backend import Array, Device, array_module
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import ConfigError
from mpitrain.nn import Module, Sequential
from mpitrain.optim import Optimizer
from mpitrain.parallel.gradients.norm import Parts
from mpitrain.parallel.gradients.replicas import broadcast_state
from mpitrain.parallel.layers.context_parallel import ContextParallel
from mpitrain.parallel.layers.expert_parallel import ExpertParallel
from mpitrain.parallel.layers.tensor_parallel import TensorParallel
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.parallel.pipeline.neighbours import Neighbours
from mpitrain.parallel.pipeline.tied import Twins
from mpitrain.placement.stages import Stage, can_be_cut, cut
from mpitrain.placement.tensor_plan import read_plan
from mpitrain.schedules.grid import COPIES, REPLICAS
from mpitrain.schedules.microtree import share
from mpitrain.schedules.pipeline import Schedule
from mpitrain.schedules.pipeline_check import actions_of


@dataclass
class Held:
    """A rank's part of the model. `replicas` connects the ranks that hold the same, but for experts, `copies` those that hold the
    same experts too, and `parts` those that hold one model together (None where each holds all of it)."""

    mesh: Mesh
    control: Channel
    stage: Stage
    replicas: Channel
    copies: Channel
    parts: Channel | None = None
    neighbours: Neighbours | None = None
    tensor: TensorParallel | None = None                     # of layers that several ranks hold together
    context: ContextParallel | None = None                   # of samples that several ranks share
    choices: dict[str, Any] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """What could not be had, for the run to say."""
        return [] if self.tensor is None else self.tensor.group.notes

    @property
    def counts(self) -> bool:
        """Whether this is the one rank that counts what its pipeline puts out."""
        return self.stage.is_last and self.mesh.coordinate("tp") == 0

    def feed(self, device: Device, dtype: Any, *, tokens: bool) -> Feed:
        """What gives this rank its part of samples."""
        return Feed(device, dtype, tokens=tokens, part=None if self.context is None else self.context.part)

    def refuse_samples(self, x: Array, y: Array) -> None:
        """MeshError where ranks cannot share samples of these shapes."""
        if self.context is not None:
            self.context.refuse_samples(x, y)

    @property
    def in_step(self) -> bool:
        """Whether ranks that have samples of their own must run the model equally often: they have experts for each other."""
        return self.mesh.size("ep") > 1

    def agree_on_schedule(self, schedule: Schedule, name: str, n_micro: int) -> None:
        """DesyncError where ranks have another user's schedule by the same name. It communicates."""
        if schedule.__module__.startswith("mpitrain."):
            return
        n, n_stages, chunks = self.mesh.n_places, self.stage.n_stages, len(self.stage.chunks)
        counts = sorted({stop - first for first, stop in (share(rank, n, n_micro) for rank in range(n))})
        actions = [[str(action) for action in actions_of(schedule, stage, n_stages, count, chunks)]
                   for count in counts for stage in range(n_stages)]
        self.control.agree(sha256(repr(actions).encode()).hexdigest(), f"the actions of the schedule {name} (SHA-256)")

    def twins(self, storage: Parts) -> Twins | None:
        """What adds up the gradients of twins; None where there are none. It communicates."""
        if not any(parameter.twin_of for parameter in self.stage.whole.parameters()):
            return None
        return Twins(storage, self.mesh.link("pp", "twins"), self.mesh.channel("pp", "twins"), self.stage.place)

    def of_the_last(self, value: Any) -> tuple[Any, ...]:
        """What the ranks that hold the model's last block have, as a tuple, on all."""
        if self.stage.n_stages == 1:
            return tuple(value)
        last = self.control.size // self.stage.n_stages * (self.stage.n_stages - 1)           # its rank: pp is the outermost axis
        return tuple(self.control.broadcast_object(list(value) if value is not None else None, last))

    def output_shape(self, found: Any) -> tuple[int, ...]:
        """The shape of the model's output, on all ranks, where ranks that hold its last block have `found`. It communicates."""
        shape = self.of_the_last(found)
        return shape if self.tensor is None else self.tensor.shape(shape)

    def loss(self, loss: Any) -> Any:
        """`loss` for the outputs as this rank has them."""
        return loss if self.tensor is None else self.tensor.loss(loss)

    def classes(self, output: Array) -> Array:
        """The class of the largest output of each row; called alike by the ranks that hold the model's last block."""
        found: Array = array_module(output).argmax(output, axis=-1) if self.tensor is None else self.tensor.classes(output)
        return found

    def refuse_optimizer(self, optimizer: Optimizer) -> None:
        """ConfigError where it needs norms of whole parameters, and ranks have parts of them."""
        for s in optimizer.storage.segments if optimizer.whole_parameters else ():
            for axis in s.parameter.placement:
                raise ConfigError(f"{type(optimizer).__name__} needs norms of whole parameters, and mesh.{axis} = "
                                  f'{self.mesh.size(axis)} cuts "{s.name}"; set optimizer.name = "adamw" or "sgd", or '
                                  f"mesh.{axis} = 1")

    def start_alike(self, arrays: dict[str, Array]) -> None:
        """Ranks that hold the same start from the same bits; DesyncError where they cannot. It communicates.

        `arrays` has this rank's part of the training state, by names that end with the parameter's.
        """
        leaves = dict((*self.stage.model.named_parameters(), *self.stage.model.named_buffers()))

        def whole(axis: str) -> dict[str, Array]:
            cut = {name for name, leaf in leaves.items() if axis in leaf.placement}
            return {name: array for name, array in arrays.items() if name.rpartition("/")[2] not in cut}

        broadcast_state(arrays, self.copies)
        if self.copies is not self.replicas:
            broadcast_state(whole("ep"), self.replicas)
        if self.tensor is not None:
            broadcast_state(whole("tp"), self.tensor.messages)


def hold(model: Module, mesh: Mesh, control: Channel, *, chunks: int = 1, stages: Any = "blocks", untie: bool = False,
         plan: Mapping[str, str] | None = None, sequence: bool = False, shared: bool = True) -> Held:
    """Cuts `model`, which has no memory yet, as the mesh says. `untie` gives shared parameters twins also where nothing is cut.

    `stages` is "blocks" (about as many on each), each virtual stage's number of blocks, or a function of the model that gives
    these. `plan` (default: the model's own) and `sequence` say how layers are cut along tp, `shared` whether their sums may go
    through memory that ranks share. Raises MeshError and ConfigError, alike on all ranks, where the model cannot be cut so. It
    communicates.
    """
    n_stages = mesh.size("pp")
    if plan and mesh.size("tp") == 1:
        read_plan(model, plan)                                # a plan that would be refused is so before there are ranks for it
    if isinstance(model, Sequential):
        model.separate()
        if untie or n_stages > 1:
            model.untie()
    if callable(stages):
        stages = stages(model) if n_stages > 1 and can_be_cut(model, n_stages * chunks) else ()
    tensor = TensorParallel(model, mesh, plan, sequence=sequence, shared=shared) if mesh.size("tp") > 1 else None
    context = ContextParallel(model, mesh, tensor.along if tensor else ()) if mesh.size("cp") > 1 else None
    if mesh.size("ep") > 1:
        ExpertParallel(model, mesh)
    counts = stages if isinstance(stages, (list, tuple)) else ()
    stage = cut(model, mesh.coordinate("pp"), n_stages, chunks, counts=counts)
    if not mesh.cuts_model:
        return Held(mesh, control, stage, control, control, context=context)
    replicas, parts = mesh.channel(REPLICAS, "replicas"), mesh.channel(("pp", "ep", "tp"), "parts")
    copies = mesh.channel(COPIES, "copies") if mesh.size("ep") > 1 else replicas
    held = Held(mesh, control, stage, replicas, copies, parts, tensor=tensor, context=context)
    if n_stages > 1:
        held.neighbours = Neighbours(mesh.link("pp", "stages"), stage)
        for chunk in stage.chunks:
            if isinstance(chunk, Sequential):
                chunk.between = mesh.progress.progress
        held.choices["stages"] = stage.bounds
    return held
