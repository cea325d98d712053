"""A placement joined with a mesh: the channels to the ranks that have the same part of a model, or the other parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from mpitrain.backend import Array, Device, array_module
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.nn import Sequential
from mpitrain.parallel.gradients.norm import Parts
from mpitrain.parallel.gradients.replicas import broadcast_state
from mpitrain.parallel.layers.context_parallel import join_attention
from mpitrain.parallel.layers.expert_parallel import Dispatcher, LoneDispatcher
from mpitrain.parallel.layers.ring_attention import LoneRing, Ring
from mpitrain.parallel.layers.tensor_functions import Group, LoneGroup
from mpitrain.parallel.layers.tensor_parallel import TensorParallel
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.parallel.pipeline.neighbours import Neighbours
from mpitrain.parallel.pipeline.tied import Twins
from mpitrain.placement.experts import AXIS
from mpitrain.placement.place import Placement
from mpitrain.placement.stages import Stage
from mpitrain.schedules.grid import COPIES, REPLICAS
from mpitrain.schedules.microtree import share
from mpitrain.schedules.pipeline import Schedule
from mpitrain.schedules.pipeline_check import actions_of


@dataclass
class Held:
    """A placement joined with the other ranks.

    The channel `replicas` connects ranks with copies of one part of the model, which may have different experts, `copies` ranks
    that have the same experts too, and `parts` the ranks that hold one model together (None where each holds all of it).
    """

    placement: Placement
    mesh: Mesh
    control: Channel
    replicas: Channel
    copies: Channel
    parts: Channel | None = None
    neighbours: Neighbours | None = None
    tensor: TensorParallel | None = None                     # of layers that several ranks hold together
    choices: dict[str, Any] = field(default_factory=dict)

    @property
    def stage(self) -> Stage:
        return self.placement.stage

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
        return Feed(device, dtype, tokens=tokens, part=self.placement.part)

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


def connect(placement: Placement, mesh: Mesh, control: Channel, *, shared: bool = True) -> Held:
    """Joins what was placed for this rank with the other ranks of `mesh`; `shared`: sums of layers may go through memory that
    ranks share. It communicates."""
    stage, group, ring, experts = placement.stage, None, None, None
    if mesh.size("tp") > 1:
        channel = mesh.channel("tp", "layers")
        group = Group(mesh.share_memory(channel) if shared else channel)
    if mesh.size("cp") > 1:
        ring = Ring(mesh.link("cp", "ring"))
    if mesh.size(AXIS) > 1:
        experts = partial(Dispatcher, mesh.channel(AXIS, "experts"))
    tensor = join_layers(placement, group, ring, experts)
    if not mesh.cuts_model:
        return Held(placement, mesh, control, control, control)
    replicas, parts = mesh.channel(REPLICAS, "replicas"), mesh.channel(("pp", "ep", "tp"), "parts")
    copies = mesh.channel(COPIES, "copies") if mesh.size(AXIS) > 1 else replicas
    held = Held(placement, mesh, control, replicas, copies, parts, tensor=tensor)
    if stage.n_stages > 1:
        held.neighbours = Neighbours(mesh.link("pp", "stages"), stage)
        for chunk in stage.chunks:
            if isinstance(chunk, Sequential):
                chunk.between = mesh.progress.progress
        held.choices["stages"] = stage.bounds
    return held


def alone(placement: Placement) -> TensorParallel | None:
    """Joins a placement with stand-ins for the other ranks: this rank's part of the model runs by itself."""
    at, size = placement.grid.coordinate, placement.grid.size
    return join_layers(placement, LoneGroup(at("tp"), size("tp")), LoneRing(at("cp"), size("cp")) if size("cp") > 1 else None,
                       lambda path: LoneDispatcher(at(AXIS), size(AXIS)))


def join_layers(placement: Placement, group: Group | None, ring: Ring | None,
                experts: Callable[[str], Dispatcher] | None) -> TensorParallel | None:
    """Gives every layer that several ranks have together its way to the others; what does so for layers cut along tp."""
    tensor = TensorParallel(placement.layers, group, sequence=placement.mesh.sequence, head=placement.head) \
        if group is not None and placement.layers else None
    if ring is not None:
        join_attention(placement.stage.whole, ring)
    for path, mixture in placement.experts:
        assert experts is not None
        mixture.across = experts(path)
    return tensor
