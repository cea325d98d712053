"""What a layer asks of other ranks, where it is not computed by one rank alone: the base class of all that `Module.across` holds.

Who connects the ranks gives each such layer an object of a class of its own, with the methods that this kind of layer calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import Array

Places: TypeAlias = np.ndarray[Any, Any]          # whole numbers (L,)
Experts: TypeAlias = Callable[[Any], Tensor]


class Across:
    """The part of the layers that need no more than this: they ask nobody, but may have some of each sample's positions alone."""

    positions: Callable[[int], Places] | None = None      # where so many positions lie in their sample; None: all are here
    attend: Callable[..., Tensor]                         # `MultiHeadAttention`: `ops.self_attention` over all ranks' positions
    exchange: Callable[[Tensor, Experts], Tensor]         # `MixtureOfExperts`: rows to the experts, wherever they are, and back
    reduce: Callable[[Array], None]                       # `SyncBatchNorm`: adds an array over the ranks, in place

    lockstep = False      # the other ranks run this layer for the same rows, so they find the same loss at the same time
    absent = ""           # what a rank does not see that runs the layer alone, in words

    def forward(self, inner: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """What the layer computes in the place of its own forward, `inner`."""
        return inner(*inputs, **named)

    def alone(self) -> Across:
        """A stand-in that answers without the other ranks, with made-up values of the right shape and dtype."""
        return self
