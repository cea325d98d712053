"""The update of a rank's shard, and what a run does otherwise where states are cut over data-parallel ranks (`shards`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.backend import Array, Device
from mpitrain.comm.face import AnyChannel, Work
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.nn import FlatLayout, FlatStorage, Module
from mpitrain.optim import Optimizer
from mpitrain.parallel.gradients.norm import GradientNorm
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.statistics import Statistics
from mpitrain.parallel.pipeline.tied import Twins
from mpitrain.parallel.policies.gathered import Gathered
from mpitrain.parallel.policies.node_memory import NodeCopy
from mpitrain.parallel.policies.replicated import Outcome, Replicated
from mpitrain.placement.shard_cuts import shared_keys, where_to_cut
from mpitrain.placement.shards import Shards, Unit
from mpitrain.placement.stages import Stage
from mpitrain.schedules.grid import REPLICAS
from mpitrain.schedules.steps import Algorithm


class Sharding:
    """What is cut over dp: `kind` is one of `KINDS` but "none". Made, and used, by all ranks alike.

    Ask it in this order: initialise (the model's memory), then an optimizer is made of `shards`, then reducer and update.
    `copy`, where it is set first, holds the whole parameters, once on each node, for its ranks.
    """

    def __init__(self, kind: str, mesh: Mesh):
        self.kind, self.mesh = kind, mesh
        self.channel = mesh.channel(REPLICAS, "parameters")
        self.copy: NodeCopy | None = None
        self.gathered: Gathered | None = None
        self.shards: Shards
        self._values: Array | None = None                     # the whole layout's, where they are not cut

    @property
    def cuts_gradients(self) -> bool:
        return self.kind != "optimizer"

    @property
    def cuts_parameters(self) -> bool:
        return self.kind == "parameters" and self.copy is None       # a copy on the only node there is: all of it is in slices

    def initialise(self, stage: Stage, seed: int, precision: str, device: Device, *, bucket_bytes: int,
                   whole: bool) -> FlatLayout:
        """Gives the stage's model its initial values, of which this rank keeps its slices where parameters are cut."""
        model, copy, ranks = stage.model, self.copy, self.channel
        layout = model.describe(seed, precision, device) if self.cuts_parameters else \
            model.initialize(seed, precision, device, None if copy is None else copy.allocate)
        shards = self.shards = Shards(layout, ranks.rank if copy is None else copy.number, ranks.size, bucket_bytes=bucket_bytes,
                                      cuts=where_to_cut(stage, layout, blocks=self.cuts_parameters), whole=whole,
                                      alike=shared_keys(stage))
        if isinstance(layout, FlatStorage):
            self._values = layout.values
            shards.values = shards.strips(layout.values)
        else:
            shards.values = shards.initialise(seed)
            self.gathered = Gathered(stage.chunks, shards, self.channel, self.mesh.progress.progress)
        return layout

    def parts_of(self, gradients: Array) -> Any:
        """This rank's slices of what a reducer has."""
        return gradients if self.cuts_gradients else self.shards.strips(gradients)

    def spread(self, unit: Unit) -> Work | None:
        """Begins to give all ranks the owners' new values of a bucket; None where each rank keeps its own alone."""
        if self._values is None or self.channel.size == 1:
            return None
        if self.copy is not None:
            return self.copy.spread(self._values, unit)
        return self.channel.start_all_gather(self._values[unit.start:unit.stop], unit.owners_to_all, unit.name)

    def settle(self) -> None:
        """The end of an update: from here on no rank of a node writes what another one reads."""
        if self.copy is not None:
            self.copy.meet("parameters")

    @property
    def values_nbytes(self) -> int:
        """The bytes of this rank's parameters: of a copy that a node's ranks have together, its share."""
        if self._values is None:
            return int(self.shards.values.nbytes)
        return -(-int(self._values.nbytes) // (1 if self.copy is None else self.copy.shared.node.size))

    def forget(self) -> None:
        """Values have been written: what was put together of them before is not used any more."""
        if self.gathered is not None:
            self.gathered.forget()


class SliceSums:
    """What a `GradientReducer` takes for its channel: a sum of which each rank keeps its slice alone.

    In memory that all ranks share where there is some (`shared`), so in the order of the plain sum there; else by messages. With
    a `copy` on each node, a node's sum is made in its memory, and only that travels.
    """

    def __init__(self, channel: AnyChannel, shards: Shards, copy: NodeCopy | None = None):
        self.size, self.rank, self.copy = channel.size, channel.rank, copy
        self.channel = channel
        self._units = {unit.name: unit for unit in shards.units}

    def start_steps(self, array: Array, name: str, steps: Algorithm) -> Work:
        """Sums of the caller's own steps are whole on every rank."""
        return self.channel.start_steps(array, name, steps)

    def start_allreduce(self, array: Array, name: str) -> Work:
        unit = self._units[name]
        if self.copy is not None:
            return self.copy.shared.start_reduce_scatter(array, name, self.copy.piece(unit))
        own = unit.within.start, unit.within.stop
        return self.channel.start_slice(array, name, own, unit.sum_to_owners)


class ShardedUpdate(Replicated):
    """Every rank updates its slices, and gives them to the others where those keep whole parameters."""

    def __init__(self, model: Module, optimizer: Optimizer, reducer: GradientReducer, channel: Channel,
                 rate: Callable[[int], float], sharding: Sharding, *, clip_norm: float, statistics: Statistics,
                 norm: GradientNorm, twins: Twins | None):
        super().__init__(model, optimizer, reducer, channel, rate, clip_norm=clip_norm, statistics=statistics, norm=norm,
                         twins=twins)
        self.sharding = sharding

    @property
    def _values_nbytes(self) -> int:
        return self.sharding.values_nbytes

    def finish(self) -> Outcome:
        """The rest of the exchange, then the update of this rank's slices. NumericsError before any parameter changes."""
        gradients = self.sharding.parts_of(self.reducer.finish())
        if self.twins is not None:
            self.twins.add(gradients)
        lr, (norm, scale) = self.rate(self.step), self._norm_and_scale(gradients)
        self.sharding.forget()
        works = []
        for unit in self.sharding.shards.units:
            self.optimizer.update(gradients, lr=lr, step=self.step + 1, scale=scale, segments=unit.parts)
            works.append(self.sharding.spread(unit))
        for segment in self.reducer.storage.segments:         # the other ranks' slices change too
            segment.parameter.mark_changed()
        for work in works:
            if work is not None:
                work.wait()
        self.sharding.settle()
        self.optimizer.steps = self.step + 1
        self._update_buffers()
        self.step += 1
        return {"lr": lr, "grad_norm": norm, "comm_exposed_s": self.reducer.exposed_s}
