"""Context parallelism: samples too long for a rank, of which each of several ranks has some positions (axis cp of the mesh).

All of a model but attention treats every position by itself, so each rank computes it for its own positions, with parameters that
all of them have; their gradients are summed as those of data-parallel ranks are. Attention goes round the ring of these ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any

from mpitrain.autograd import Tensor
from mpitrain.backend import Array
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import ConfigError, MeshError
from mpitrain.nn import Module, MultiHeadAttention, mixtures
from mpitrain.parallel.layers.ring_attention import Ring, ring_attention
from mpitrain.placement.zigzag import LENGTH, part, positions, refuse_length


class ContextParallel:
    """A model whose samples are cut over the ranks of a mesh's cp axis. Made by all of them, before memory is given.

    The dropouts of `cut` work on parts of what is here: the one of this rank's place of those along tp.
    """

    def __init__(self, model: Module, mesh: Mesh, cut: Collection[Module] = ()):
        self.rank, self.size = mesh.coordinate("cp"), mesh.size("cp")
        refuse_model(model, self.size)
        self.ring = Ring(mesh.link("cp", "ring"))

        @cache
        def spread(length: int) -> Array:
            return positions(length, self.rank, self.size)

        @cache
        def spread_further(length: int) -> Array:
            return spread(length * mesh.size("tp"))[length * mesh.coordinate("tp"):][:length]

        for path, module in model.named_modules():
            vars(module)["spread"] = spread_further if any(module is other for other in cut) else spread
            if isinstance(module, MultiHeadAttention):
                vars(module)["attend"] = partial(ring_attention, ring=self.ring)
                vars(module)["forward"] = without_mask(module.forward, path, self.size)

    def part(self, x: Array) -> Array:
        """This rank's positions of whole samples (B, L, ...)."""
        return part(x, self.rank, self.size)

    def refuse_samples(self, x: Array, y: Array) -> None:
        """MeshError where samples have no positions that can be cut."""
        if min(x.ndim, y.ndim) <= LENGTH or x.shape[LENGTH] != y.shape[LENGTH]:
            raise MeshError(f"mesh.cp = {self.size} cuts inputs and targets along their positions (dim 1), and a sample here is "
                            f"{x.shape[1:]} with a target {y.shape[1:]}, not as many positions in both; set mesh.cp = 1")
        refuse_length(x.shape[LENGTH], self.size)


def refuse_model(model: Module, n: int) -> None:
    """ConfigError naming the first layer that may look at several positions at once in another way than attention."""
    for path, _ in mixtures(model):
        raise ConfigError(f'mesh.cp = {n} cuts samples, and experts ("{path}") choose among whole ones; set mesh.cp = 1')
    for path, module in model.named_modules():
        if not treats_positions_apart(module):
            raise ConfigError(f'mesh.cp = {n} cuts samples along their positions, and "{path or "the model"}" '
                              f"({type(module).__name__}) may look at several of them; set mesh.cp = 1, or, where only "
                              "MultiHeadAttention in it does, by_position = True in its class")


def treats_positions_apart(module: Module) -> bool:
    """Whether it, or its class, says so; a class with a `forward` of its own must say so anew."""
    if "by_position" in vars(module):
        return bool(vars(module)["by_position"])
    return next((bool(vars(kind).get("by_position")) for kind in type(module).__mro__
                 if "by_position" in vars(kind) or "forward" in vars(kind)), False)


def without_mask(inner: Callable[..., Tensor], path: str, n: int) -> Callable[..., Tensor]:
    """Attention that refuses a mask, which has a row for each query and a column for each key, and no rank has all of them."""
    def forward(x: Any, mask: Any = None) -> Tensor:
        if mask is not None:
            raise ConfigError(f'mesh.cp = {n} cuts samples along their positions, and the attention "{path}" is given a mask of '
                              "whole samples; use causal = True, or set mesh.cp = 1")
        return inner(x)
    return forward
