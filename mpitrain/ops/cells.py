"""One step of an LSTM, GRU or RNN, made of other operations, so that it has derivatives of every order; and many such steps.

Letters: `B` batch, `I` inputs, `H` hidden, `P` numbers of the state h (H unless an LSTM projects it), `R` rows.
"""

from __future__ import annotations

from typing import Any

from mpitrain.autograd import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ShapeError
from mpitrain.kernels.recurrent import walk
from mpitrain.ops.activation import relu, sigmoid, tanh
from mpitrain.ops.index import getitem
from mpitrain.ops.linalg import linear
from mpitrain.ops.shape import concatenate, split

__all__ = ["gru_cell", "lstm_cell", "rnn_cell"]

GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def lstm_cell(x: Any, h: Any, c: Any, weight_input: Any, weight_state: Any, bias_input: Any = None, bias_state: Any = None,
              projection: Any = None) -> tuple[Tensor, Tensor]:
    """The next (h, c), (B, P) and (B, H), of x (B, I); weights as `ops.lstm` takes them."""
    _check("lstm", x, (h, c), (weight_input, weight_state, bias_input, bias_state), projection)
    return _lstm(linear(x, weight_input, bias_input), (h, c), weight_state, bias_state, projection)


def gru_cell(x: Any, h: Any, weight_input: Any, weight_state: Any, bias_input: Any = None, bias_state: Any = None) -> Tensor:
    """The next h (B, H) of x (B, I); weights as `ops.gru` takes them."""
    _check("gru", x, (h,), (weight_input, weight_state, bias_input, bias_state))
    return _gru(linear(x, weight_input, bias_input), (h,), weight_state, bias_state)[0]


def rnn_cell(x: Any, h: Any, weight_input: Any, weight_state: Any, bias_input: Any = None, bias_state: Any = None, *,
             nonlinearity: str = "tanh") -> Tensor:
    """The next h (B, H) of x (B, I): tanh, or relu, of x W' + b + h V' + d."""
    if nonlinearity not in ("tanh", "relu"):
        raise ShapeError(f'rnn_cell: nonlinearity is "tanh" or "relu", not "{nonlinearity}"')
    _check("rnn", x, (h,), (weight_input, weight_state, bias_input, bias_state))
    return _rnn(linear(x, weight_input, bias_input), (h,), weight_state, bias_state, is_relu=nonlinearity == "relu")[0]


def _check(kind: str, x: Any, states: tuple[Any, ...], weights: tuple[Any, ...], projection: Any = None) -> None:
    """ShapeError where the states or weights of one step do not fit x and each other."""
    shape, rows = tuple(x.shape), weights[1].shape[0]
    hidden = rows // GATES[kind]
    width = hidden if projection is None else projection.shape[0]
    if len(shape) != 2:
        raise ShapeError(f"{kind}_cell: x has shape {shape}, expected (batch, inputs)")
    expected = [("the input's weight", weights[0], (GATES[kind] * hidden, shape[1])),
                ("the state's weight", weights[1], (GATES[kind] * hidden, width)),
                ("the input's bias", weights[2], (rows,)), ("the state's bias", weights[3], (rows,)),
                ("the projection", projection, (width, hidden)), ("h", states[0], (shape[0], width)),
                ("c", states[1] if len(states) > 1 else None, (shape[0], hidden))]
    for what, array, wanted in expected:
        if array is not None and tuple(array.shape) != wanted:
            raise ShapeError(f"{kind}_cell: {what} has shape {tuple(array.shape)}, expected {wanted}")


def _lstm(made: Tensor, states: tuple[Any, ...], weight: Any, bias: Any, projection: Any = None) -> tuple[Tensor, Tensor]:
    i, f, g, o = split(made + linear(states[0], weight, bias), weight.shape[0] // 4, dim=1)
    c = sigmoid(f) * states[1] + sigmoid(i) * tanh(g)
    h = sigmoid(o) * tanh(c)
    return h if projection is None else linear(h, projection), c


def _gru(made: Tensor, states: tuple[Any, ...], weight: Any, bias: Any) -> tuple[Tensor]:
    hidden = weight.shape[0] // 3
    r, z, new = split(made, hidden, dim=1)
    r_state, z_state, n_state = split(linear(states[0], weight, bias), hidden, dim=1)
    n = tanh(new + sigmoid(r + r_state) * n_state)
    return n + sigmoid(z + z_state) * (states[0] - n),


def _rnn(made: Tensor, states: tuple[Any, ...], weight: Any, bias: Any, *, is_relu: bool) -> tuple[Tensor]:
    total = made + linear(states[0], weight, bias)
    return relu(total) if is_relu else tanh(total),


def unrolled(kind: str, x: Any, weights: tuple[Any, ...], states: tuple[Any, ...], sizes: Array, reverse: bool, is_relu: bool
             ) -> tuple[Tensor, ...]:
    """What `ops.recurrent` computes in one operation: (out (R, P), last states) from the rows x (R, I) of a packed batch."""
    w_input, w_state, b_input, b_state, projection = weights
    made, outputs = linear(x, w_input, b_input), []
    for first, count, _, _ in walk(sizes, reverse):
        now, known = made[first:first + count], tuple(getitem(state, slice(0, count)) for state in states)
        after: tuple[Tensor, ...]
        if kind == "lstm":
            after = _lstm(now, known, w_state, b_state, projection)
        else:
            after = _gru(now, known, w_state, b_state) if kind == "gru" else _rnn(now, known, w_state, b_state, is_relu=is_relu)
        outputs.append(after[0])
        states = tuple(concatenate([new, getitem(old, slice(count, None))]) if count < old.shape[0] else new
                       for new, old in zip(after, states))
    return concatenate(outputs[::-1] if reverse else outputs), *states
