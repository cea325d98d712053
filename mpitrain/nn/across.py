"""What a layer asks of other ranks, where one rank does not compute it alone: the base class of what `Module.across` holds.

Who connects the ranks gives each such layer an object of a class of its own, with the method that this kind of layer calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from mpitrain.autograd import Tensor
from mpitrain.backend import Array

Experts: TypeAlias = Callable[[Any], Tensor]


class Across:
    """The way to the ranks that have a layer together with this one. All of them call it alike, in the same order."""

    attend: Callable[..., Tensor]                     # `MultiHeadAttention`: `ops.self_attention` over all ranks' positions
    exchange: Callable[[Tensor, Experts], Tensor]     # `MixtureOfExperts`: rows to the experts, wherever they are, and back
    reduce: Callable[[Array], None]                   # `SyncBatchNorm`: adds an array over the ranks, in place

    lockstep = False      # whether the other ranks run the layer for the same rows, so that one loss is not finite on all of them
    absent = ""           # what a rank does not see that runs the layer alone, in words

    def forward(self, inner: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """What the layer computes in the place of its own forward, `inner`."""
        return inner(*inputs, **named)

    def alone(self) -> Across:
        """A stand-in that answers without the other ranks, with made-up values of the right shape and dtype."""
        raise NotImplementedError
