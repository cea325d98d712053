"""Linear layers as products of two smaller ones, by the singular value decomposition (Denton et al. 2014).

The best approximation of rank r of a weight W (N, K), in the sum of squares (Eckart and Young 1936), is a product (N, r) (r, K),
which has fewer numbers where r (N + K) < N K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, nearest
from mpitrain.nn import init
from mpitrain.shrink.lora import put_for, refuse_shared


class FactoredLinear(nn.Linear):
    """(..., K) to (..., N): (x @ down.T) @ weight.T + bias, with down (r, K) and weight (N, r)."""

    def __init__(self, layer: nn.Linear, rank: int):
        vars(self).update(vars(layer))
        outputs, inputs = layer.weight.global_shape
        self.down = nn.Parameter((rank, inputs), init.normal(1 / math.sqrt(inputs)))
        self.weight = nn.Parameter((outputs, rank), init.normal(1 / math.sqrt(rank)))

    def forward(self, x: Any) -> Tensor:
        y = ops.linear(ops.linear(x, self.down), self.weight, self.bias, self.fused)
        return y if self.after is None else self.after(y)


def attach(model: nn.Module, ranks: Mapping[str, Any]) -> None:
    """Gives the model factored layers of these ranks, by name, before it has memory. ConfigError, by name, where it cannot be."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    for path, rank in ranks.items():
        if path not in layers:
            raise ConfigError(f'model.ranks: no linear layer is called "{path}"{nearest(path, layers)}')
        least = min(layers[path].weight.global_shape)
        if type(rank) is not int or not 1 <= rank <= least:
            raise ConfigError(f'model.ranks: the rank of "{path}" is an integer of 1 to {least}, found {rank!r}')
        refuse_shared(model, path, layers[path], "model.ranks")
        put_for(model, layers[path], FactoredLinear(layers[path], rank))


def choose(model: nn.Module, patterns: Sequence[str], rank: int | None, energy: float | None) -> dict[str, int]:
    """The rank of each layer that the patterns name: `rank`, or the least whose singular values have this share of the squares'
    sum. Layers that would have as many numbers as before are left out. ConfigError for a pattern without a layer."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    found: dict[str, int] = {}
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in layers):
            raise ConfigError(f'--layers: no linear layer is called "{pattern}"{nearest(pattern, layers)}')
    for path, layer in layers.items():
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            refuse_shared(model, path, layer, "--layers")
            outputs, inputs = layer.weight.global_shape
            r = rank if energy is None else _rank_of(layer, energy)
            if r is not None and r * (outputs + inputs) < outputs * inputs:
                found[path] = r
    return found


def _rank_of(layer: nn.Linear, energy: float) -> int:
    squares = np.linalg.svd(np.asarray(layer.weight.numpy(), np.float64), compute_uv=False) ** 2
    return 1 + int(np.searchsorted(np.cumsum(squares), energy * squares.sum() * (1 - 1e-12)))


def factor(model: nn.Module, factored: nn.Module) -> dict[str, float]:
    """Gives `factored`, the same model with factored layers, the values of `model`; the relative error of each weight.

    Each factor has the square roots of the singular values. Computed in float64, rounded once.
    """
    values = {name: leaf.numpy() for name, leaf in (*model.named_parameters(), *model.named_buffers())}
    errors: dict[str, float] = {}
    for path, layer in factored.named_modules():
        if isinstance(layer, FactoredLinear):
            whole, rank = np.asarray(values[f"{path}.weight"], np.float64), layer.down.shape[0]
            u, s, v = np.linalg.svd(whole, full_matrices=False)
            root = np.sqrt(s[:rank])
            values[f"{path}.weight"], values[f"{path}.down"] = u[:, :rank] * root, root[:, None] * v[:rank]
            errors[path] = float(np.linalg.norm(s[rank:]) / (np.linalg.norm(s) or 1.0))
    for name, leaf in (*factored.named_parameters(), *factored.named_buffers()):
        leaf.array[...] = values[name]
        leaf.mark_changed()
    return errors
