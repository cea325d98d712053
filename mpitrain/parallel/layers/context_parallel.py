"""Context parallelism: samples too long for a rank, of which each of several ranks has some positions (axis cp of the mesh).

All of a model but attention treats every position by itself, so each rank computes it for its own positions, with parameters that
all of them have; their gradients are summed as those of data-parallel ranks are. Attention goes round the ring of these ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError
from mpitrain.nn import Module, MultiHeadAttention
from mpitrain.parallel.layers.ring_attention import Ring, ring_attention


def join_attention(model: Module, ring: Ring) -> None:
    """Attention goes round the ring from now on. Called by all ranks of it, for a model whose positions are cut."""
    for path, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            vars(module)["attend"] = partial(ring_attention, ring=ring)
            vars(module)["forward"] = without_mask(module.forward, path, ring.size)


def without_mask(inner: Callable[..., Tensor], path: str, n: int) -> Callable[..., Tensor]:
    """Attention that refuses a mask, which has a row for each query and a column for each key, and no rank has all of them."""
    def forward(x: Any, mask: Any = None) -> Tensor:
        if mask is not None:
            raise ConfigError(f'mesh.cp = {n} cuts samples along their positions, and the attention "{path}" is given a mask of '
                              "whole samples; use causal = True, or set mesh.cp = 1")
        return inner(x)
    return forward
