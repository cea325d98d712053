"""Layers that several ranks share, connected with those ranks; only a mesh that has such layers imports this."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpitrain.comm.mesh import Mesh
from mpitrain.nn import MultiHeadAttention
from mpitrain.parallel.layers.context_parallel import AcrossPositions
from mpitrain.parallel.layers.expert_parallel import Dispatcher, LoneDispatcher
from mpitrain.parallel.layers.ring_attention import LoneRing, Ring
from mpitrain.parallel.layers.tensor_functions import Group, LoneGroup
from mpitrain.parallel.layers.tensor_parallel import join_layer
from mpitrain.placement.experts import AXIS
from mpitrain.placement.place import Placement


def join(placement: Placement, mesh: Mesh, *, shared: bool) -> Group | None:
    """Connects the layers with the ranks of `mesh`; returns those along tp. `shared`: they may sum in memory that they share.

    It communicates.
    """
    group, ring, experts = None, None, None
    if mesh.size("tp") > 1:
        channel = mesh.channel("tp", "layers")
        group = Group(mesh.share_memory(channel) if shared else channel)
    if mesh.size("cp") > 1:
        ring = Ring(mesh.link("cp", "ring"))
    if mesh.size(AXIS) > 1:
        experts = partial(Dispatcher, mesh.channel(AXIS, "experts"))
    join_layers(placement, group, ring, experts)
    return group


def alone(placement: Placement) -> Group:
    """Joins a placement with stand-ins for the other ranks, so that this rank's part of the model runs by itself."""
    at, size = placement.grid.coordinate, placement.grid.size
    group = LoneGroup(at("tp"), size("tp"))
    join_layers(placement, group, LoneRing(at("cp"), size("cp")) if size("cp") > 1 else None,
                lambda path: LoneDispatcher(at(AXIS), size(AXIS)))
    return group


def join_layers(placement: Placement, group: Group | None, ring: Ring | None,
                experts: Callable[[str], Dispatcher] | None) -> None:
    """Connects every layer that several ranks share with those ranks."""
    for layer in placement.layers:
        assert group is not None
        join_layer(layer, group, placement.mesh.sequence)
    for path, module in placement.stage.whole.named_modules() if ring is not None else ():
        if isinstance(module, MultiHeadAttention):
            assert ring is not None
            module.across = AcrossPositions(ring, path)
    for path, mixture in placement.experts:
        assert experts is not None
        mixture.across = experts(path)
