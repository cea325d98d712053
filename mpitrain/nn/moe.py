"""A mixture of experts: of many small networks, each row of the input goes through the few that a router chooses for it.

Shazeer et al.: "Outrageously large neural networks", 2017; Lepikhin et al.: "GShard", 2020; Fedus, Zoph, Shazeer: "Switch
transformers", 2021. Letters: `T` rows (tokens), `D` width, `H` hidden, `E` experts, `C` places of each expert.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain import ops
from mpitrain.autograd import Tensor, grad_enabled, recomputing
from mpitrain.backend import Array, asnumpy
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn import init
from mpitrain.nn.basic import Linear
from mpitrain.nn.init import Initialiser
from mpitrain.nn.module import Module
from mpitrain.nn.parameter import Parameter
from mpitrain.ops.experts import Route, balance_value, capacity_of, route
from mpitrain.ops.linalg import FUSED_ACTIVATIONS

__all__ = ["MixtureOfExperts", "mixtures"]

TALLY_UNIT = 1 << 16


class MixtureOfExperts(Module):
    """(..., D) to (..., D): for each row the sum over its `top_k` experts of gate * narrow(activation(wide(row))).

    The router's scores are a softmax, never in less than float32. Gates are the scores of the chosen experts, divided by their
    sum if `normalised` (default: where top_k > 1, as GShard; a single gate would be 1 and the router learn nothing from it, so
    Switch leaves it).

    An expert has C = ceil(capacity * top_k * T / E) places for the T rows of a micro-batch. They go to first choices before
    second ones, in the order of rows. A choice that finds none adds nothing; a row with none comes out as zeros, and so passes
    through the residual stream around the layer alone. Nothing of this depends on the number of ranks.

    With `balance`, the loss has that much times the mean over micro-batches (by their rows) of E * sum of f_i P_i, the share of
    choices times the mean score of expert i: 1 where experts are used evenly. It is added in backward: see `ops.expert_balance`.
    """

    def __init__(self, width: int, hidden: int, experts: int, top_k: int = 2, capacity: float = 1.25, *, balance: float = 0.01,
                 normalised: bool | None = None, activation: str = "gelu", bias: bool = True,
                 weight_init: Initialiser = init.default_weight, out_init: Initialiser = init.default_weight,
                 router_init: Initialiser = init.default_weight):
        refuse(experts, top_k, capacity, balance, activation)
        self.top_k, self.capacity, self.balance, self.activation = top_k, capacity, balance, activation
        self.experts = experts
        self.normalised = top_k > 1 if normalised is None else normalised
        self.router = Linear(width, experts, bias=False, weight_init=router_init)
        self.wide = Parameter((experts, hidden, width), init.of_each(weight_init))
        self.wide_bias = Parameter((experts, hidden), init.zeros, decay=False) if bias else None      # two dims, yet no matrix
        self.narrow = Parameter((experts, width, hidden), init.of_each(out_init))
        self.narrow_bias = Parameter((experts, width), init.zeros, decay=False) if bias else None
        self._tally: Array | None = None

    def forward(self, x: Any) -> Tensor:
        shape = tuple(x.shape)
        width = self.wide.shape[2]
        if shape[-1:] != (width,):
            raise ShapeError(f"a mixture of experts expects input of width {width}, got shape {shape}; change one of them")
        rows = ops.reshape(x, -1, width)
        scores = ops.softmax(ops.linear(rows, self.router.weight, operands=""))
        to = route(scores, self.top_k, capacity_of(len(rows), self.experts, self.top_k, self.capacity))
        if self.training:
            self._note(scores, to)
            if self.balance and grad_enabled():
                scores = ops.expert_balance(scores, to, self.balance)
        there = ops.dispatch(rows, to)
        back = self.outputs(there) if self.across is None else self.across.exchange(there, self.outputs)
        return ops.reshape(ops.combine(back, ops.expert_gates(scores, to, normalised=self.normalised), to), *shape)

    def outputs(self, x: Any) -> Tensor:
        """The outputs of this rank's experts for the rows at their places, (local experts, any, D)."""
        return ops.expert_linear(ops.expert_linear(x, self.wide, self.wide_bias, self.activation), self.narrow, self.narrow_bias)

    def _note(self, scores: Tensor, to: Route) -> None:
        if not recomputing():                     # it was noted the first time
            xp, rows = scores.xp, float(scores.shape[0])
            noted = xp.zeros(4)
            value = xp.rint(balance_value(scores, to) * TALLY_UNIT) / TALLY_UNIT        # sums are exact then
            noted[0], noted[1] = rows * value, rows
            noted[2], noted[3] = (to.slots < 0).sum(), to.assigned
            self._tally = noted if self._tally is None else self._tally + noted

    def take_tally(self) -> np.ndarray[Any, Any]:
        """(4,) float64, since the last call in training: balance * rows, rows, choices that were dropped, and all choices.

        The balance is rounded to multiples of 2**-16, so that sums are the same in any order.
        """
        noted, self._tally = self._tally, None
        return np.zeros(4) if noted is None else asnumpy(noted)


def mixtures(model: Module) -> list[tuple[str, MixtureOfExperts]]:
    """The mixtures of a model, with their names."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)]


def refuse(experts: int, top_k: int, capacity: float, balance: float, activation: str) -> None:
    """ConfigError for what no mixture can be made of."""
    if experts < 1 or not 1 <= top_k <= experts:
        raise ConfigError(f"{experts} experts of which each row takes {top_k}; experts must be 1 or more, and top_k from 1 to "
                          "experts")
    if not 0 < capacity < float("inf"):
        raise ConfigError(f"capacity must be a finite number above 0, found {capacity}; 1.25 leaves a quarter more places than "
                          "even choices take")
    if not 0 <= balance < float("inf"):
        raise ConfigError(f"balance must be a finite number, 0 or more, found {balance}; 0.01 is usual")
    if activation not in FUSED_ACTIVATIONS:
        raise ConfigError(f'the activation of experts is one of {", ".join(sorted(FUSED_ACTIVATIONS))}, not "{activation}"')
