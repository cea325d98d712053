"""Small networks that many models use as one layer. Letters: `N` batch, `C` channels, `D` width."""

from __future__ import annotations

from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.nn.activation import ACTIVATIONS
from mpitrain.nn.basic import Linear
from mpitrain.nn.module import Module

__all__ = ["SqueezeExcitation", "SwiGLU"]


class SqueezeExcitation(Module):
    """x (N, C, ...) times a gate for each channel, made from the channels' means (Hu et al. 2018).

    The gate is gate(expand(activation(squeeze(means)))), two linear layers with `squeezed` numbers between them.
    """

    paths = (), ("squeeze", "expand", "gate")

    def __init__(self, channels: int, squeezed: int, activation: str = "relu", gate: str = "sigmoid"):
        self.squeeze = Linear(channels, squeezed, activation=activation)
        self.expand = Linear(squeezed, channels)
        self.gate = ACTIVATIONS.resolve(gate)()

    def forward(self, x: Any) -> Tensor:
        shape = tuple(x.shape)
        if len(shape) < 3:
            raise ShapeError(f"SqueezeExcitation expects (N, C, ...) of 3 dims or more, got shape {shape}")
        means = ops.mean(x, dim=tuple(range(2, len(shape))))
        gates = self.gate(self.expand(self.squeeze(means)))
        return ops.multiply(x, ops.reshape(gates, *shape[:2], *(1 for _ in shape[2:])))


class SwiGLU(Module):
    """down(silu(gate(x)) * up(x)), (..., D) to (..., D) with `hidden` numbers between (Shazeer 2020)."""

    by_position = True
    chains = ("gate", "down"), ("up", "down")

    def __init__(self, width: int, hidden: int, bias: bool = False):
        self.gate = Linear(width, hidden, bias, activation="silu")
        self.up = Linear(width, hidden, bias)
        self.down = Linear(hidden, width, bias)

    def forward(self, x: Any) -> Any:
        return self.down(self.gate(x) * self.up(x))
