"""Models of graphs, of which a row of the data is one node with the neighbours that were sampled for it.

Letters: `B` batch, `T` nodes of a row, `D` width. A row with `samples` = [S1, S2] has 1 + S1 + S1 S2 nodes: the node itself, S1
of its neighbours, and S2 neighbours of each of those, in that order. So a row needs nothing but itself: rows are shuffled, shared
out over ranks, predicted and served like those of any other data, and the graph may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError
from mpitrain.models.registry import of_positions, require_list_of_sizes, require_sizes
from mpitrain.nn.basic import Check


class Aggregate(nn.Module):
    """(B, T, D) to (B, T', O) without the farthest neighbours: relu(W [x; mean of x's neighbours] + b), scaled to length 1."""

    def __init__(self, inputs: int, outputs: int, samples: Sequence[int], eps: float = 1e-12):
        self.samples, self.eps = tuple(samples), eps
        self.linear = nn.Linear(2 * inputs, outputs, activation="relu")

    def forward(self, x: Any) -> Tensor:
        sizes = list(accumulate(self.samples, mul, initial=1))             # nodes at 0, 1, ... steps from the row's own
        ends = list(accumulate(sizes))
        means = []
        for step, sampled in enumerate(self.samples):
            around = x[:, ends[step]:ends[step + 1]]
            means.append(ops.mean(ops.reshape(around, x.shape[0], sizes[step], sampled, x.shape[2]), dim=2))
        neighbours = ops.concatenate(means, dim=1) if len(means) > 1 else means[0]
        y = self.linear(ops.concatenate([x[:, :ends[-2]], neighbours], dim=-1))
        scaled: Tensor = y / ops.sqrt(ops.sum(y * y, dim=-1, keepdim=True) + self.eps)
        return scaled


class Own(nn.Module):
    """(B, 1, D) to (B, D): the node that is left."""

    def forward(self, x: Any) -> Tensor:
        return ops.getitem(x, (slice(None), 0))


@of_positions
def graphsage(inputs: int, outputs: int, samples: Sequence[int] = (25, 10), hidden: Sequence[int] = (128, 128),
              dropout: float = 0.0) -> nn.Sequential:
    """GraphSAGE with the mean of sampled neighbours (Hamilton, Ying and Leskovec 2017, algorithm 2).

    (B, T, inputs) to (B, outputs). Layer k brings in what is k steps away; `hidden` are the outputs of each layer, one for
    each of `samples`.
    """
    require_sizes(inputs=inputs, outputs=outputs)
    require_list_of_sizes("samples", samples)
    if not samples:
        raise ConfigError("graphsage: model.samples is empty, expected the number of neighbours sampled at each step")
    require_list_of_sizes("hidden", hidden, len(samples))
    nodes = sum(accumulate(samples, mul, initial=1))
    widths, blocks = [inputs, *hidden], []
    for i, (width, following) in enumerate(zip(widths, hidden)):
        blocks += [(f"layer{i}", Aggregate(width, following, samples[:len(samples) - i])), (f"dropout{i}", nn.Dropout(dropout))]
    model = nn.Sequential(("input", Check("graphsage", (None, nodes, inputs), "set model.inputs and model.samples")),
                          *blocks, ("own", Own()), ("head", nn.Linear(widths[-1], outputs)))
    model.plan = {"layer*.linear": "gathered"}
    return model
