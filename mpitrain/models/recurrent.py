"""Recurrent models of series: LSTM and GRU. Letters: `B` batch, `L` length, `I` inputs, `H` hidden, `D` directions (1 or 2)."""

from __future__ import annotations

from typing import Any

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.models.registry import of_positions, require_sizes
from mpitrain.nn.basic import Check


class Layer(nn.Module):
    """(B, L, I) to (B, L, D H): one layer, whose states stay inside."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], inputs: int, hidden: int, bidirectional: bool):
        self.cells = kind(inputs, hidden, bidirectional=bidirectional)

    def forward(self, x: Any) -> Tensor:
        y: Tensor = self.cells(x)[0]
        return y


class Final(nn.Module):
    """(B, L, D H) to (B, D H): the last state of each direction, which for the second one stands at the first position."""

    def __init__(self, hidden: int, bidirectional: bool):
        self.hidden, self.bidirectional = hidden, bidirectional

    def forward(self, x: Any) -> Tensor:
        if not self.bidirectional:
            return ops.getitem(x, (slice(None), -1))
        ends = [ops.getitem(x, (slice(None), at, part)) for at, part in ((-1, slice(self.hidden)), (0, slice(self.hidden, None)))]
        return ops.concatenate(ends, dim=-1)


def _recurrent(name: str, kind: type[nn.LSTM] | type[nn.GRU], inputs: int, hidden: int, outputs: int, layers: int,
               dropout: float, bidirectional: bool) -> nn.Sequential:
    require_sizes(inputs=inputs, hidden=hidden, outputs=outputs, layers=layers)
    width = hidden * (2 if bidirectional else 1)
    blocks: list[tuple[str, nn.Module]] = [("input", Check(name, (None, None, inputs), "set model.inputs"))]
    for i in range(layers):
        blocks.append((f"layer{i}", Layer(kind, width if i else inputs, hidden, bidirectional)))
        if i < layers - 1:
            blocks.append((f"dropout{i}", nn.Dropout(dropout)))
    return nn.Sequential(*blocks, ("final", Final(hidden, bidirectional)), (f"dropout{layers - 1}", nn.Dropout(dropout)),
                         ("head", nn.Linear(width, outputs)))


@of_positions
def lstm(inputs: int, hidden: int, outputs: int, layers: int = 1, dropout: float = 0.0, bidirectional: bool = False
         ) -> nn.Sequential:
    """Long short-term memory (Hochreiter and Schmidhuber 1997): series (B, L, I) to numbers or logits (B, outputs).

    A linear layer sees the last hidden state, of both directions where `bidirectional`. Dropout acts behind each layer.
    """
    return _recurrent("lstm", nn.LSTM, inputs, hidden, outputs, layers, dropout, bidirectional)


@of_positions
def gru(inputs: int, hidden: int, outputs: int, layers: int = 1, dropout: float = 0.0, bidirectional: bool = False
        ) -> nn.Sequential:
    """Gated recurrent units (Cho et al. 2014); otherwise as `lstm`."""
    return _recurrent("gru", nn.GRU, inputs, hidden, outputs, layers, dropout, bidirectional)
