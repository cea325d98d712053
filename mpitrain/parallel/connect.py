"""A placement connected with a mesh: channels to the ranks that have the same part of a model, and to those with other parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from mpitrain.backend import Array, class_of_rows
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.messages.channel import Channel
from mpitrain.nn import FlatLayout, Sequential
from mpitrain.parallel.gradients.replicas import broadcast_state
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.placement.experts import AXIS
from mpitrain.placement.place import Placement
from mpitrain.placement.stages import Stage
from mpitrain.schedules.grid import COPIES, REPLICAS
from mpitrain.schedules.microtree import share
from mpitrain.schedules.pipeline import Schedule
from mpitrain.schedules.pipeline_check import actions_of

if TYPE_CHECKING:
    from mpitrain.optim import Segment
    from mpitrain.parallel.layers.tensor_functions import Group
    from mpitrain.parallel.pipeline.neighbours import Neighbours
    from mpitrain.parallel.pipeline.tied import TiedParameters


@dataclass
class ParallelContext:
    """The placement of a rank, and the channels that connect it with the other ranks of the mesh.

    The channel `replicas` connects the ranks with the same dense parameters, and `copies` those with the same experts as well.
    The channel `parts` connects the ranks that hold one model together (None where each rank holds all of it), and `group` those
    that share layers along tp. `sites` connects the ranks that have this one's place on each site, and
    `site` those of its own site (None where there is one site).
    """

    placement: Placement
    mesh: Mesh
    control: Channel
    replicas: Channel
    copies: Channel
    parts: Channel | None = None
    sites: Channel | None = None
    site: Channel | None = None
    neighbours: Neighbours | None = None
    group: Group | None = None
    choices: dict[str, Any] = field(default_factory=dict)

    @property
    def own_site(self) -> Channel:
        """The channel of the ranks that hold this site's model."""
        return self.control if self.site is None else self.site

    @property
    def stage(self) -> Stage:
        return self.placement.stage

    @property
    def notes(self) -> list[str]:
        """Why ranks that share layers do not share memory, for the run to say."""
        return [] if self.group is None else list(self.group.channel.notes)

    @property
    def counts(self) -> bool:
        """Whether this rank is the one that counts the outputs of its pipeline."""
        return self.stage.is_last and self.mesh.coordinate("tp") == 0

    def feed(self, layout: FlatLayout, *, tokens: bool) -> Feed:
        """The feed that gives this rank its part of samples, in the formats of a model's memory."""
        return Feed(layout.device, layout.dtype, tokens=tokens, part=self.placement.part, compute=layout.compute_dtype)

    def agree_on_schedule(self, schedule: Schedule, name: str, n_micro: int) -> None:
        """DesyncError where ranks have another user's schedule by the same name. It communicates."""
        if schedule.__module__.startswith("mpitrain."):
            return
        n, n_stages, chunks = self.mesh.n_places, self.stage.n_stages, len(self.stage.chunks)
        counts = sorted({stop - first for first, stop in (share(rank, n, n_micro) for rank in range(n))})
        actions = [[str(action) for action in actions_of(schedule, stage, n_stages, count, chunks)]
                   for count in counts for stage in range(n_stages)]
        self.control.agree(sha256(repr(actions).encode()).hexdigest(), f"the actions of the schedule {name} (SHA-256)")

    def tied_parameters(self, segments: Sequence[Segment]) -> TiedParameters | None:
        """The sum of tied parameters' gradients in `segments`; None where no parameters are tied. It communicates."""
        if not any(parameter.twin_of for parameter in self.stage.whole.parameters()):
            return None
        from mpitrain.parallel.pipeline.tied import TiedParameters
        return TiedParameters(segments, self.mesh.link("pp", "twins"), self.mesh.channel("pp", "twins"), self.stage.places)

    def output_shape(self, found: Any) -> tuple[int, ...]:
        """The shape of the model's output, on all ranks, where ranks of the last stage have `found`. It communicates."""
        n_stages = self.stage.n_stages
        if n_stages > 1:
            last = self.control.size // self.mesh.n_sites // n_stages * (n_stages - 1)      # the first rank of its last stage
            found = self.control.broadcast_object(None if found is None else list(found), last)
        return self.placement.output_shape(found)

    def loss(self, loss: Any) -> Any:
        """`loss` for the outputs as this rank has them."""
        if self.group is None:
            return loss
        from mpitrain.parallel.layers.tensor_loss import cut_loss
        return cut_loss(loss, self.placement.head, self.group)

    def classes(self, output: Array) -> Array:
        """The class of the largest output of each row, NO_CLASS where one is NaN; called alike by the ranks that hold the
        model's last block."""
        if self.placement.head is not None and self.group is not None:
            from mpitrain.parallel.layers.tensor_loss import largest
            return largest(output, self.group, self.placement.head.first)
        found: Array = class_of_rows(output)
        return found

    def whole_outputs(self, output: Array) -> Array:
        """Outputs of which this rank may have a part of the last dim; called alike by the ranks that hold the last block."""
        if self.placement.head is not None and self.group is not None:
            return self.group.gather(output, -1, "outputs")
        return output

    def start_alike(self, arrays: dict[str, Array], *, apart: bool = False) -> None:
        """Makes copies of a parameter start from the same bits; DesyncError where they cannot. It communicates.

        `arrays` has this rank's part of the training state, by names that end with the parameter's; `apart`: sites have states
        of their own.
        """
        leaves = dict((*self.stage.model.named_parameters(), *self.stage.model.named_buffers()))

        def whole(axis: str) -> dict[str, Array]:
            cut = {name for name, leaf in leaves.items() if axis in leaf.placement}
            return {name: array for name, array in arrays.items() if name.rpartition("/")[2] not in cut}

        broadcast_state(arrays, self.copies)
        if self.copies is not self.replicas:
            broadcast_state(whole("ep"), self.replicas)
        if self.group is not None:
            broadcast_state(whole("tp"), self.group.channel.messages)
        if self.sites is not None and not apart:
            model = ("parameters/", "buffers/")               # Of other state, sites have other arrays, in another order.
            broadcast_state({name: one for name, one in arrays.items() if name.startswith(model)}, self.sites)


def connect(placement: Placement, mesh: Mesh, control: Channel, *, shared: bool = True) -> ParallelContext:
    """Connects a placement with the ranks of `mesh`. `shared`: layers may sum in memory that ranks share. It communicates."""
    stage, group = placement.stage, None
    if mesh.shares_layers:
        from mpitrain.parallel.layers.join import join
        group = join(placement, mesh, shared=shared)
    sites = mesh.channel("site", "sites") if mesh.n_sites > 1 else None
    site = mesh.channel(("pp", *REPLICAS, "tp"), "site") if sites is not None else None
    replicas = control if sites is None and not mesh.cuts_model else mesh.channel(REPLICAS, "replicas")
    if not mesh.cuts_model:
        return ParallelContext(placement, mesh, control, replicas, replicas, sites=sites, site=site)
    parts = mesh.channel(("pp", "ep", "tp"), "parts")
    copies = mesh.channel(COPIES, "copies") if mesh.size(AXIS) > 1 else replicas
    context = ParallelContext(placement, mesh, control, replicas, copies, parts, sites, site, group=group)
    if stage.n_stages > 1:
        from mpitrain.parallel.pipeline.neighbours import Neighbours
        context.neighbours = Neighbours(mesh.link("pp", "stages"), stage)
        for chunk in stage.chunks:
            if isinstance(chunk, Sequential):
                chunk.between = mesh.progress.progress
        context.choices["stages"] = stage.bounds
    return context
