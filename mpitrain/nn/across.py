"""The communication of a layer that several ranks compute together: the base class of `Module.across`.

Each kind of parallelism gives its layers an object of a subclass, with the method that this kind of layer calls.
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
    attend_groups: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None    # the same with fewer heads for keys and values
    exchange: Callable[[Tensor, Experts], Tensor]     # `MixtureOfExperts`: rows to the experts, wherever they are, and back
    reduce: Callable[[Array], None]                   # `SyncBatchNorm`: adds an array over the ranks, in place

    lockstep = False      # True where the other ranks run the layer for the same rows: a loss is then not finite on all of them
    absent = ""           # a description of what is missing where one rank runs the layer alone

    def forward(self, inner: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """The layer's output, in place of its own forward, `inner`."""
        return inner(*inputs, **named)

    def alone(self) -> Across:
        """A stand-in that answers without the other ranks, with made-up values of the right shape and dtype."""
        raise NotImplementedError
