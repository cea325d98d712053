"""LSTM, GRU and RNN over sequences, with PyTorch's gate order, parameter names and shapes; their cells are in nn/cells.py.

Letters: `B` batch, `L` length, `I` inputs, `H` hidden, `P` numbers of h (H, or an LSTM's proj_size), `D` directions (1 or 2).
"""

from __future__ import annotations

import math
from typing import Any

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, GraphError, ShapeError
from mpitrain.nn import init
from mpitrain.nn.basic import Dropout
from mpitrain.nn.module import Module
from mpitrain.nn.packed import PackedSequence, pack_padded_sequence, pad_packed_sequence
from mpitrain.nn.parameter import Parameter

__all__ = ["GRU", "LSTM", "RNN"]


class Recurrent(Module):
    """Layers of one kind; `dropout` acts between layers. Weights start uniform in +-1 / sqrt(H)."""

    gates = 0
    n_states = 1

    def __init__(self, inputs: int, hidden: int, num_layers: int = 1, bias: bool = True, batch_first: bool = True,
                 dropout: float = 0.0, bidirectional: bool = False, *, proj_size: int = 0):
        for what, size, least in (("inputs", inputs, 1), ("hidden", hidden, 1), ("num_layers", num_layers, 1),
                                  ("proj_size", proj_size, 0)):
            if not isinstance(size, int) or size < least:
                raise ShapeError(f"{type(self).__name__}: {what} is {size!r}, expected an integer of at least {least}")
        for what, flag in (("bias", bias), ("batch_first", batch_first)):
            if not isinstance(flag, bool):
                raise ConfigError(f"{type(self).__name__}: {what} is {flag!r}, expected True or False")
        if proj_size >= hidden:
            raise ShapeError(f"{type(self).__name__}: proj_size is {proj_size}, expected less than hidden, {hidden}")
        self.inputs, self.hidden, self.layers, self.batch_first = inputs, hidden, num_layers, batch_first
        self.width = proj_size or hidden
        self.suffixes = ("", "_reverse") if bidirectional else ("",)
        values, rows = init.uniform(1.0 / math.sqrt(hidden)), self.gates * hidden
        for layer in range(num_layers):
            shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, self.width * len(self.suffixes) if layer else inputs),
                                                  "weight_hh": (rows, self.width)}
            if bias:
                shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
            if proj_size:
                shapes["weight_hr"] = (proj_size, hidden)
            for suffix in self.suffixes:
                for name, shape in shapes.items():
                    setattr(self, f"{name}_l{layer}{suffix}", Parameter(shape, values))
        self.dropout = Dropout(dropout)

    def run(self, x: Any, weights: dict[str, Any], states: tuple[Any, ...], **options: Any) -> tuple[Tensor, ...]:
        """One layer in one direction: the operation's results."""
        raise GraphError(f"{type(self).__name__} defines no layer")

    def forward(self, x: Any, state: Any = None) -> tuple[Any, Any]:
        """(B, L, D P) of the last layer, and the last state: h (layers D, B, P), of an LSTM (h, c), c (layers D, B, H).

        x is (B, L, I), or (L, B, I) where not `batch_first`, or (L, I) of one sequence, whose states have no B; or a
        PackedSequence, and so is then the result. `state` is the first one, 0 by default.
        """
        if isinstance(x, PackedSequence):
            return self._packed(x, state)
        shape = tuple(x.shape)
        if len(shape) not in (2, 3) or shape[-1] != self.inputs:
            dims = "batch, length" if self.batch_first else "length, batch"
            raise ShapeError(f"{type(self).__name__} expects input of shape ({dims}, {self.inputs}), got {shape}")
        single, at = len(shape) == 2, 0 if self.batch_first else 1
        if single:
            x = ops.expand_dims(x, at)
        if 0 in x.shape[:2]:
            what = "an empty batch" if x.shape[at] == 0 else "sequences of length 0"
            raise ShapeError(f"{type(self).__name__} got {what}: {shape}")
        states = self._first(state, () if single else (x.shape[at],))
        if single:
            states = tuple(None if each is None else ops.expand_dims(each, 1) for each in states)
        y, last = self._run(ops.swapaxes(x, 0, 1) if self.batch_first else x, states, None)
        y = ops.swapaxes(y, 0, 1) if self.batch_first else y
        if single:
            y, last = ops.squeeze(y, at), tuple(ops.squeeze(each, 1) for each in last)
        return y, last if self.n_states > 1 else last[0]

    def _packed(self, x: PackedSequence, state: Any) -> tuple[PackedSequence, Any]:
        states = self._first(state, (int(x.batch_sizes[0]),))
        if len(x.data.shape) != 2 or x.data.shape[1] != self.inputs:
            raise ShapeError(f"{type(self).__name__} expects packed input of shape (rows, {self.inputs}), got "
                             f"{tuple(x.data.shape)}")
        if x.sorted_indices is not None:
            states = tuple(None if each is None else ops.getitem(each, (slice(None), x.sorted_indices)) for each in states)
        y, last = self._run(x.data, states, x)
        if x.unsorted_indices is not None:
            last = tuple(ops.getitem(each, (slice(None), x.unsorted_indices)) for each in last)
        return x._replace(data=y), last if self.n_states > 1 else last[0]

    def _first(self, state: Any, batch: tuple[int, ...]) -> tuple[Any, ...]:
        """The first states as given, or None for each."""
        if state is None:
            return (None,) * self.n_states
        given = state if self.n_states > 1 else (state,)
        expected = [(self.layers * len(self.suffixes), *batch, width) for width in (self.width, self.hidden)[:self.n_states]]
        found = [tuple(each.shape) for each in given] if isinstance(given, (tuple, list)) else [tuple(given.shape)]
        if found != expected:
            raise ShapeError(f"{type(self).__name__} expects a state of shape {' and '.join(map(str, expected))}, got "
                             f"{' and '.join(map(str, found))}")
        return tuple(given)

    def _run(self, x: Any, states: tuple[Any, ...], packed: PackedSequence | None) -> tuple[Any, tuple[Tensor, ...]]:
        """All layers on x (L, B, I), or on the rows of `packed`."""
        last: list[tuple[Tensor, ...]] = []
        for layer in range(self.layers):
            if layer and self.dropout.drops:
                x = self._dropped(x, packed)
            outputs = []
            for direction, suffix in enumerate(self.suffixes):
                weights = {name: getattr(self, f"{name}_l{layer}{suffix}", None)
                           for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")}
                start = tuple(None if each is None else ops.getitem(each, len(last)) for each in states)
                out, *final = self.run(x, weights, start, sizes=None if packed is None else packed.batch_sizes,
                                       reverse=direction == 1)
                outputs.append(out)
                last.append(tuple(final))
            x = outputs[0] if len(outputs) == 1 else ops.concatenate(outputs, dim=-1)
        return x, tuple(ops.stack(each) for each in zip(*last))

    def _dropped(self, x: Any, packed: PackedSequence | None) -> Any:
        """Dropout by sample and step, wherever packing has moved those."""
        if packed is None:
            return ops.swapaxes(self.dropout(ops.swapaxes(x, 0, 1)), 0, 1)
        padded, lengths = pad_packed_sequence(packed._replace(data=x))
        return pack_padded_sequence(self.dropout(padded), lengths, enforce_sorted=packed.sorted_indices is None).data


def _four(weights: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(weights[name] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))


class LSTM(Recurrent):
    """Hochreiter and Schmidhuber, 1997; gates in the order input, forget, cell, output. `proj_size`: Sak et al., 2014."""

    gates, n_states = 4, 2

    def run(self, x: Any, weights: dict[str, Any], states: tuple[Any, ...], **options: Any) -> tuple[Tensor, ...]:
        return ops.lstm(x, *_four(weights), *states, projection=weights["weight_hr"], **options)


class GRU(Recurrent):
    """Cho et al., 2014, in PyTorch's form; gates in the order reset, update, new."""

    gates = 3

    def __init__(self, inputs: int, hidden: int, num_layers: int = 1, bias: bool = True, batch_first: bool = True,
                 dropout: float = 0.0, bidirectional: bool = False):
        super().__init__(inputs, hidden, num_layers, bias, batch_first, dropout, bidirectional)

    def run(self, x: Any, weights: dict[str, Any], states: tuple[Any, ...], **options: Any) -> tuple[Tensor, ...]:
        return ops.gru(x, *_four(weights), *states, **options)


class RNN(Recurrent):
    """Elman, 1990: h = tanh(W x + V h + b), or relu of that."""

    gates = 1

    def __init__(self, inputs: int, hidden: int, num_layers: int = 1, nonlinearity: str = "tanh", bias: bool = True,
                 batch_first: bool = True, dropout: float = 0.0, bidirectional: bool = False):
        super().__init__(inputs, hidden, num_layers, bias, batch_first, dropout, bidirectional)
        if nonlinearity not in ("tanh", "relu"):
            raise ShapeError(f'RNN: nonlinearity is "tanh" or "relu", not "{nonlinearity}"')
        self.nonlinearity = nonlinearity

    def run(self, x: Any, weights: dict[str, Any], states: tuple[Any, ...], **options: Any) -> tuple[Tensor, ...]:
        return ops.rnn(x, *_four(weights), *states, nonlinearity=self.nonlinearity, **options)
