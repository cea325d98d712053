"""Context parallelism: long samples whose positions are cut over several ranks (axis cp of the mesh).

All layers but attention treat every position by itself, so each rank computes them for its own positions, with whole parameters,
whose gradients are summed as those of data-parallel ranks are. Attention goes round the ring of these ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.nn.across import Across
from mpitrain.parallel.layers.ring_attention import LoneRing, Ring, ring_attention


class AcrossPositions(Across):
    """The attention of one layer over all ranks of the ring."""

    absent = "another rank's positions (mesh.cp)"

    def __init__(self, ring: Ring, path: str):
        self.ring, self.path, self.attend = ring, path, partial(ring_attention, ring=ring)

    def forward(self, inner: Callable[..., Any], x: Any, mask: Any = None, **further: Any) -> Any:
        """Refuses a mask, which has a row for each query and a column for each key: no rank has all of them.

        The layer itself refuses what else it may be given (`further`)."""
        if mask is not None:
            raise ConfigError(f"mesh.cp = {self.ring.size} cuts samples along their positions, and the attention "
                              f'"{self.path}" is given a mask of whole samples; use causal = True, or set mesh.cp = 1')
        return inner(x, **further)

    def alone(self) -> Across:
        return AcrossPositions(LoneRing(self.ring.rank, self.ring.size), self.path)
