"""LSTM and GRU over sequences (B, L, I), with PyTorch's gate order, parameter names and shapes.

The products with the inputs are one matrix product for the whole sequence; only those with the state run step by step.
Letters: `B` batch, `L` length, `I` inputs, `H` hidden, `G` gates x hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import GraphError, ShapeError
from mpitrain.nn import init
from mpitrain.nn.basic import Dropout
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter

__all__ = ["GRU", "LSTM"]

State: TypeAlias = tuple[Tensor, ...]             # each (B, H): (h, c) for LSTM, (h,) for GRU


class Recurrent(Module):
    """Layers of one cell; `dropout` acts between layers."""

    gates = 0
    n_states = 1
    weight_hh_l0: Parameter                       # and so on: set by name below

    def __init__(self, inputs: int, hidden: int, layers: int = 1, *, bias: bool = True, dropout: float = 0.0):
        self.inputs, self.hidden, self.layers = inputs, hidden, layers
        values = init.uniform(1.0 / math.sqrt(hidden))
        for layer in range(layers):
            shapes = {"weight_ih": (self.gates * hidden, hidden if layer else inputs), "weight_hh": (self.gates * hidden, hidden),
                      "bias_ih": (self.gates * hidden,), "bias_hh": (self.gates * hidden,)}
            for name, shape in shapes.items():
                if bias or name.startswith("weight"):
                    setattr(self, f"{name}_l{layer}", Parameter(shape, values))
        self.dropout = Dropout(dropout)

    def forward(self, x: Any, state: Any = None) -> tuple[Tensor, Any]:
        """(B, L, H) of the last layer, and the final state: h, or (h, c), each (layers, B, H); so is `state`, default 0."""
        if len(x.shape) != 3 or x.shape[2] != self.inputs:
            raise ShapeError(f"{type(self).__name__} expects input of shape (batch, length, {self.inputs}), got {tuple(x.shape)}")
        if x.shape[1] == 0:
            raise ShapeError(f"{type(self).__name__} got sequences of length 0: {tuple(x.shape)}")
        finals: list[State] = []
        for layer in range(self.layers):
            x, final = self._layer(x if layer == 0 else self.dropout(x), layer, self._start(x, state, layer))
            finals.append(final)
        stacked = tuple(ops.stack(states) for states in zip(*finals))
        return x, stacked if self.n_states > 1 else stacked[0]

    def _start(self, x: Any, state: Any, layer: int) -> State:
        if state is None:
            zeros = self.weight_hh_l0.xp.zeros((x.shape[0], self.hidden), self.weight_hh_l0.dtype)
            return (Tensor(zeros),) * self.n_states
        given = state if self.n_states > 1 else (state,)
        return tuple(ops.getitem(s, layer) for s in given)

    def _layer(self, x: Any, layer: int, state: State) -> tuple[Tensor, State]:
        w_ih, w_hh = getattr(self, f"weight_ih_l{layer}"), getattr(self, f"weight_hh_l{layer}")
        b_ih, b_hh = getattr(self, f"bias_ih_l{layer}", None), getattr(self, f"bias_hh_l{layer}", None)
        from_inputs = ops.linear(ops.swapaxes(x, 0, 1), w_ih, b_ih)               # (L, B, G)
        outputs = []
        for now in ops.split(from_inputs, 1, dim=0):                              # one node: backward joins them once
            state = self.cell(ops.squeeze(now, 0), ops.linear(state[0], w_hh, b_hh), state)
            outputs.append(state[0])
        return ops.stack(outputs, dim=1), state

    def cell(self, from_input: Tensor, from_state: Tensor, state: State) -> State:
        """The next state, from both products (B, G)."""
        raise GraphError(f"{type(self).__name__} defines no cell")


class LSTM(Recurrent):
    """Hochreiter and Schmidhuber 1997; gates in the order input, forget, cell, output."""

    gates, n_states = 4, 2

    def cell(self, from_input: Tensor, from_state: Tensor, state: State) -> State:
        i, f, g, o = ops.split(from_input + from_state, self.hidden, dim=1)
        c = ops.sigmoid(f) * state[1] + ops.sigmoid(i) * ops.tanh(g)
        return ops.sigmoid(o) * ops.tanh(c), c


class GRU(Recurrent):
    """Cho et al. 2014, in PyTorch's form; gates in the order reset, update, new."""

    gates, n_states = 3, 1

    def cell(self, from_input: Tensor, from_state: Tensor, state: State) -> State:
        sizes: Sequence[int] = (2 * self.hidden, self.hidden)
        rz_input, n_input = ops.split(from_input, sizes, dim=1)
        rz_state, n_state = ops.split(from_state, sizes, dim=1)
        r, z = ops.split(ops.sigmoid(rz_input + rz_state), self.hidden, dim=1)
        n = ops.tanh(n_input + r * n_state)
        return (n + z * (state[0] - n),)
