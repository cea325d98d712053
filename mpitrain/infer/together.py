"""Layers that ranks have together while text is made, so that no sum is cut and bits are those of one rank.

    tp   a layer has some of its outputs on each rank, which are put together at once; attention has some heads, with their keys
    ep   a mixture has some of its experts on each rank; all ranks have all rows, and put the experts' outputs together

Letters: `T` rows, `D` width, `K` choices of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.backend.namespace import Array, array_module
from mpitrain.nn.across import Across
from mpitrain.ops.experts import route
from mpitrain.parallel.layers.expert_parallel import Dispatcher
from mpitrain.parallel.layers.tensor_functions import Group
from mpitrain.parallel.layers.tensor_parallel import Gathered


def cut_by_outputs(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """A plan for tp, made of that for training, in which layers have some of their outputs on each rank.

    (A "row" adds up partial sums, one of each rank.) Plain attention is cut by heads; in other kinds outputs are cut where it
    fits, which changes the model's layers.
    """
    modules = dict(model.named_modules())
    heads = {f"{path}.qkv" for path, module in modules.items() if isinstance(module, nn.MultiHeadAttention) and module.plain}
    for path, module in modules.items():
        if isinstance(module, nn.Linear) and path not in heads:
            module.out_groups = module.out_unit = module.in_unit = 1
    return {pattern: "gathered" if style in ("row", "column") else style for pattern, style in plan.items()
            if style != "sequence"}


def keep_own_heads(model: nn.Module) -> None:
    """What the heads of plain attention make is put together behind it, instead of their queries, keys and values."""
    for _, module in model.named_modules():
        if isinstance(module, nn.MultiHeadAttention) and module.plain and isinstance(module.qkv.across, Gathered):
            attend = ops.self_attention if module.across is None else module.across.attend
            module.across = OwnHeads(attend, module.qkv.across.group, module.qkv.across.path)
            module.qkv.across = None


def take_all_rows(model: nn.Module) -> None:
    """Mixtures' experts take all rows that choose them: a text must not depend on its company."""
    for path, module in model.named_modules():
        if isinstance(module, nn.MixtureOfExperts):
            module.across = AllRows(module, Group(module.across.channel) if isinstance(module.across, Dispatcher) else None, path)


class OwnHeads(Across):
    """Attention of the heads that are here, the outputs of all put together."""

    def __init__(self, attend: Callable[..., Tensor], group: Group, path: str):
        self.inner, self.group, self.path = attend, group, path

    def attend(self, qkv: Tensor, heads: int, **named: Any) -> Tensor:
        return Tensor(self.group.gather(self.inner(qkv, heads, **named).array, -1, f"heads before {self.path}"))


class AllRows(Across):
    """A mixture without places: each expert computes the rows that choose it, one by one, and none is left out.

    `group` are the ranks that have other experts.
    """

    def __init__(self, mixture: nn.MixtureOfExperts, group: Group | None, path: str):
        self.mixture, self.group, self.path = mixture, group, path

    def forward(self, inner: Callable[..., Any], *inputs: Any, **named: Any) -> Tensor:
        """The mixture's output (..., D) of x (..., D)."""
        mixture, x = self.mixture, inputs[0]
        rows = ops.reshape(x, -1, x.shape[-1])
        scores = ops.softmax(ops.linear(rows, mixture.router.weight, operands=""))
        to = route(scores, mixture.top_k, len(rows))
        gates = ops.expert_gates(scores, to, normalised=mixture.normalised).array[:, :, None]
        made = self._made(rows.array, to.chosen.T) * gates
        total = made[0]
        for addend in made[1:]:
            total += addend
        return Tensor(total.reshape(x.shape))

    def _made(self, rows: Array, chosen: Array) -> Array:
        """The outputs (K, T, D) of the experts chosen (K, T) for each row (T, D)."""
        mixture, xp = self.mixture, array_module(rows)
        first, here = mixture.wide.offset[0], mixture.wide.shape[0]
        made = xp.zeros((*chosen.shape, rows.shape[1]), rows.dtype)
        for expert in range(here):
            choices, asking = xp.nonzero(chosen == first + expert)
            if len(asking):
                hidden = ops.linear(rows[asking], *_of(mixture.wide, mixture.wide_bias, expert), mixture.activation)
                made[choices, asking] = ops.linear(hidden, *_of(mixture.narrow, mixture.narrow_bias, expert)).array
        if self.group is None:
            return made
        everyone = self.group.gather(made[None], 0, f"outputs of {self.path}")
        found: Array = np.take_along_axis(everyone, (chosen // here)[None, :, :, None], axis=0)[0]
        return found


def _of(weight: nn.Parameter, bias: nn.Parameter | None, expert: int) -> tuple[Array, Array | None]:
    return weight.array[expert], None if bias is None else bias.array[expert]

