"""Context parallelism: samples too long for a rank, of which each of several ranks has some positions (axis cp of the mesh).

All of a model but attention treats every position by itself, so each rank computes it for its own positions, with parameters that
all of them have; their gradients are summed as those of data-parallel ranks are. Attention goes round the ring of these ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from mpitrain.backend import Array
from mpitrain.errors import ConfigError, MeshError
from mpitrain.nn import Module, MultiHeadAttention, mixtures
from mpitrain.nn.across import Across
from mpitrain.parallel.layers.ring_attention import AloneRing, Ring, ring_attention
from mpitrain.parallel.layers.tensor_parallel import TensorParallel
from mpitrain.placement.zigzag import LENGTH, part, positions, refuse_length


class ContextParallel:
    """A model whose samples are cut over the ranks of a ring. Made by all of them, before memory is given.

    `tensor`, where layers are cut too: what it cuts along the sequence works on parts of what is here.
    """

    def __init__(self, model: Module, ring: Ring, tensor: TensorParallel | None = None):
        self.ring, self.rank, self.size = ring, ring.rank, ring.size
        refuse_model(model, self.size)

        @cache
        def here(length: int) -> Array:
            return positions(length, self.rank, self.size)

        @cache
        def further(length: int) -> Array:
            group = tensor.group if tensor is not None else ring
            return here(length * group.size)[length * group.rank:][:length]

        along = [] if tensor is None else tensor.along
        for path, module in model.named_modules():
            if isinstance(module, MultiHeadAttention):
                module.across = AcrossPositions(ring, path)
            elif module.across is None:
                module.across = Across()
            module.across.positions = further if any(module is other for other in along) else here

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


class AcrossPositions(Across):
    """What attention asks of the ranks that have the other positions of the samples."""

    absent = "another rank's positions (mesh.cp)"

    def __init__(self, ring: Ring, path: str):
        self.ring, self.path, self.attend = ring, path, partial(ring_attention, ring=ring)

    def forward(self, inner: Callable[..., Any], x: Any, mask: Any = None) -> Any:
        """Refuses a mask, which has a row for each query and a column for each key: no rank has all of them."""
        if mask is not None:
            raise ConfigError(f"mesh.cp = {self.ring.size} cuts samples along their positions, and the attention "
                              f'"{self.path}" is given a mask of whole samples; use causal = True, or set mesh.cp = 1')
        return inner(x)

    def alone(self) -> Across:
        stand_in = AcrossPositions(AloneRing(self.ring.rank, self.ring.size), self.path)
        stand_in.positions = self.positions
        return stand_in
