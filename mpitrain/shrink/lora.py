"""Low-rank adapters (Hu et al. 2021): a linear layer's weight W (N, K) stays, and scale * up @ down is added to it.

Letters: `N` outputs, `K` inputs, `r` rank, `B` batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, nearest
from mpitrain.nn import init

PARTS = ("down", "up")                           # the parameters of an adapter


class LoraLinear(nn.Linear):
    """(..., K) to (..., N): x @ W.T + bias + alpha / r * (x @ down.T) @ up.T, then the layer's activation.

    `down` (r, K) starts normal, so that it keeps the size of its input, and `up` (N, r) as zeros: at first it is `layer`, whose
    weight and bias it has, under their names.
    """

    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        vars(self).update(vars(layer))
        if layer.fused is not None:
            self.fused, self.after = None, nn.ACTIVATIONS.resolve(layer.fused)()
        outputs, inputs = layer.weight.global_shape
        self.scale = alpha / rank
        self.down = nn.Parameter((rank, inputs), init.normal(1 / math.sqrt(inputs)))
        self.up = nn.Parameter((outputs, rank), init.zeros)

    def forward(self, x: Any) -> Tensor:
        y = ops.linear(x, self.weight, self.bias) + ops.linear(ops.linear(x, self.down) * self.scale, self.up)
        return y if self.after is None else self.after(y)

    def merged_weight(self) -> Any:
        """W + scale * up @ down (N, K), computed in float64 and rounded once."""
        weight, down, up = (np.asarray(p.numpy(), np.float64) for p in (self.weight, self.down, self.up))
        return (weight + self.scale * (up @ down)).astype(self.weight.dtype)


def attach(model: nn.Module, rank: int, alpha: float, patterns: Sequence[str]) -> None:
    """Gives adapters to the linear layers that the patterns name, before the model has memory.

    ConfigError, by name, for a pattern without a linear layer, a weight that another layer uses too, and too large a rank.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in layers):
            raise ConfigError(f'lora.layers: no linear layer is called "{pattern}"{nearest(pattern, layers)}')
    for path, layer in layers.items():
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            _refuse(model, path, layer, rank)
            put_for(model, layer, LoraLinear(layer, rank, alpha))


def _refuse(model: nn.Module, path: str, layer: nn.Linear, rank: int) -> None:
    refuse_shared(model, path, layer, "lora.layers")
    if rank > min(layer.weight.global_shape):
        outputs, inputs = layer.weight.global_shape
        raise ConfigError(f'lora.rank = {rank} is more than the rank of "{path}", whose weight is ({outputs}, {inputs}); set it '
                          f"to {min(outputs, inputs)} at most")


def refuse_shared(model: nn.Module, path: str, layer: nn.Linear, key: str) -> None:
    """ConfigError, by name, for a layer whose weight another uses too, and for one that computes in a way of its own."""
    users = [other for other, module in model.named_modules() if any(value is layer.weight for value in vars(module).values())]
    if len(users) > 1:
        other = next(name for name in users if name != path)
        raise ConfigError(f'{key}: "{path}" has one weight with "{other}", and a change of one would part them; name other '
                          "layers")
    if type(layer) is not nn.Linear:
        raise ConfigError(f'{key}: "{path}" is a {type(layer).__name__}, which computes in a way of its own, not a Linear; name '
                          "other layers")


def put_for(model: nn.Module, layer: nn.Module, by: nn.Module) -> None:
    """Uses `by` wherever the model uses `layer`."""
    for _, parent in list(model.named_modules()):
        for name, value in list(vars(parent).items()):
            if value is layer:
                setattr(parent, name, by)
            elif isinstance(value, dict):
                value.update({key: by for key, item in value.items() if item is layer})
            elif isinstance(value, (list, tuple)) and any(item is layer for item in value):
                setattr(parent, name, type(value)([by if item is layer else item for item in value]))


def is_part(patterns: Sequence[str], name: str) -> bool:
    """Whether a parameter is called as one of an adapter of the layers that the patterns name."""
    path, _, part = name.rpartition(".")
    return part in PARTS and any(fnmatchcase(path, pattern) for pattern in patterns)


def merge(adapted: nn.Module, plain: nn.Module) -> None:
    """Gives `plain`, the same model without adapters, the values of `adapted`, with its adapters added to the weights."""
    values = {name: leaf.numpy() for name, leaf in (*adapted.named_parameters(), *adapted.named_buffers())}
    values |= {f"{path}.weight": layer.merged_weight() for path, layer in adapted.named_modules()
               if isinstance(layer, LoraLinear)}
    for name, leaf in (*plain.named_parameters(), *plain.named_buffers()):
        leaf.array[...] = values[name]
        leaf.mark_changed()
