"""Context parallelism: samples too long for a rank, of which each of several ranks has some positions (axis cp of the mesh).

All of a model but attention treats every position by itself, so each rank computes it for its own positions, with parameters that
all of them have; their gradients are summed as those of data-parallel ranks are. Attention goes round the ring of these ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.nn import Module, MultiHeadAttention
from mpitrain.nn.across import Across
from mpitrain.parallel.layers.ring_attention import LoneRing, Ring, ring_attention


def join_attention(model: Module, ring: Ring) -> None:
    """Attention goes round the ring from now on. Called by all ranks of it, for a model whose positions are cut."""
    for path, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            module.across = AcrossPositions(ring, path)


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
        return AcrossPositions(LoneRing(self.ring.rank, self.ring.size), self.path)
