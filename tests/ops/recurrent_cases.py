"""Recurrent layers and cells for test_on_a_device.py: an example of each op."""

from __future__ import annotations

from typing import Any

from ops.parity import normal

from mpitrain import ops


def arrays(gates: int, *states: tuple[int, ...]) -> tuple[Any, ...]:
    """Weights of 3 inputs and 4 hidden, biases, and first states."""
    return (normal(4 * gates, 3), normal(4 * gates, 4, seed=1), normal(4 * gates, seed=2), normal(4 * gates, seed=3),
            *(normal(*shape, seed=4 + i) for i, shape in enumerate(states)))


CASES: dict[str, list[tuple[Any, ...]]] = {
    "lstm": [(lambda x, *a: ops.lstm(x, *a), normal(5, 2, 3), *arrays(4)),
             (lambda x, *a: ops.lstm(x, *a), normal(5, 2, 3), *arrays(4, (2, 4), (2, 4)))],
    "gru": [(lambda x, *a: ops.gru(x, *a), normal(5, 2, 3), *arrays(3)),
            (lambda x, *a: ops.gru(x, *a), normal(5, 2, 3), *arrays(3, (2, 4)))],
    "rnn": [(lambda x, *a: ops.rnn(x, *a), normal(5, 2, 3), *arrays(1, (2, 4)))],
    "lstm_cell": [(lambda x, h, c, *a: ops.lstm_cell(x, h, c, *a), normal(2, 3), normal(2, 4), normal(2, 4), *arrays(4))],
    "gru_cell": [(lambda x, h, *a: ops.gru_cell(x, h, *a), normal(2, 3), normal(2, 4), *arrays(3))],
    "rnn_cell": [(lambda x, h, *a: ops.rnn_cell(x, h, *a), normal(2, 3), normal(2, 4), *arrays(1))],
}
