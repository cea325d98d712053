"""One step of an LSTM, GRU or RNN: for loops over steps of one's own. Letters: `B` batch, `I` inputs, `H` hidden."""

from __future__ import annotations

import math
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.backend import array_module
from mpitrain.errors import ShapeError
from mpitrain.nn import init
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter

__all__ = ["GRUCell", "LSTMCell", "RNNCell"]


class Cell(Module):
    gates = 0
    n_states = 1

    def __init__(self, inputs: int, hidden: int, bias: bool = True):
        if inputs < 1 or hidden < 1:
            raise ShapeError(f"{type(self).__name__}: {inputs} inputs and {hidden} hidden, expected at least 1 of each")
        self.inputs, self.hidden = inputs, hidden
        values, rows = init.uniform(1.0 / math.sqrt(hidden)), self.gates * hidden
        self.weight_ih, self.weight_hh = Parameter((rows, inputs), values), Parameter((rows, hidden), values)
        self.bias_ih = Parameter((rows,), values) if bias else None
        self.bias_hh = Parameter((rows,), values) if bias else None

    def step(self, x: Any, states: tuple[Any, ...]) -> tuple[Tensor, ...]:
        raise ShapeError(f"{type(self).__name__} defines no step")

    def forward(self, x: Any, state: Any = None) -> Any:
        """The next state, h or for an LSTM (h, c), each (B, H), from x (B, I); or (H,) from (I,). `state` is 0 by default."""
        name, shape = type(self).__name__, tuple(x.shape)
        if len(shape) not in (1, 2) or shape[-1] != self.inputs:
            raise ShapeError(f"{name} expects input of shape (batch, {self.inputs}), got {shape}")
        given = (state,) if self.n_states == 1 else state
        expected = [(*shape[:-1], self.hidden)] * self.n_states
        if state is None:
            xp = array_module(x.array if isinstance(x, Tensor) else x)
            given = tuple(xp.zeros(each, self.weight_hh.dtype) for each in expected)
        found = [tuple(each.shape) for each in given] if isinstance(given, (tuple, list)) else [tuple(given.shape)]
        if found != expected:
            raise ShapeError(f"{name} expects a state of shape {' and '.join(map(str, expected))}, got "
                             f"{' and '.join(map(str, found))}")
        if len(shape) == 2:
            after = self.step(x, tuple(given))
        else:
            after = self.step(ops.expand_dims(x, 0), tuple(ops.expand_dims(each, 0) for each in given))
            after = tuple(ops.squeeze(each, 0) for each in after)
        return after if self.n_states > 1 else after[0]

    def weights(self) -> tuple[Any, ...]:
        return self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh


class LSTMCell(Cell):
    """Hochreiter and Schmidhuber, 1997; gates in the order input, forget, cell, output."""

    gates, n_states = 4, 2

    def step(self, x: Any, states: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return ops.lstm_cell(x, *states, *self.weights())


class GRUCell(Cell):
    """Cho et al., 2014, in PyTorch's form; gates in the order reset, update, new."""

    gates = 3

    def step(self, x: Any, states: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return ops.gru_cell(x, *states, *self.weights()),


class RNNCell(Cell):
    """Elman, 1990: tanh, or relu, of what input and state give."""

    gates = 1

    def __init__(self, inputs: int, hidden: int, bias: bool = True, nonlinearity: str = "tanh"):
        super().__init__(inputs, hidden, bias)
        if nonlinearity not in ("tanh", "relu"):
            raise ShapeError(f'RNNCell: nonlinearity is "tanh" or "relu", not "{nonlinearity}"')
        self.nonlinearity = nonlinearity

    def step(self, x: Any, states: tuple[Any, ...]) -> tuple[Tensor, ...]:
        return ops.rnn_cell(x, *states, *self.weights(), nonlinearity=self.nonlinearity),
