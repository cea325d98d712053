"""Low-rank adapters (Hu et al. 2021): a linear layer's weight W (N, K) stays, and scale * up @ down is added to it.

Letters: `N` outputs, `K` inputs, `r` rank, `B` batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import numpy as np

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, nearest
from mpitrain.nn import init
from mpitrain.nn.lowbit import LowBitLinear, LowBitProduct, RoundedLinear
from mpitrain.shrink.exchange import exchange

PARTS = ("down", "up")                           # the parameters of an adapter


class LoraLinear(nn.Linear):
    """(..., K) to (..., N): x @ W.T + bias + alpha / r * (x @ down.T) @ up.T, then the layer's activation.

    `down` (r, K) starts normal, so that it keeps the size of its input, and `up` (N, r) as zeros: at first it is `layer`, whose
    weight and bias it has, under their names.
    """

    alike = MappingProxyType({0: "up", 1: "down"})

    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        vars(self).update(vars(layer))
        if layer.fused is not None:
            self.fused, self.after = None, nn.ACTIVATIONS.resolve(layer.fused)()
        give_adapter(self, layer.weight.global_shape, rank, alpha)

    def forward(self, x: Any) -> Tensor:
        y = ops.linear(x, self.weight, self.bias) + added(self, x)
        return y if self.after is None else self.after(y)

    def products(self, x: Any) -> Tensor:
        return ops.linear(x, self.weight) + added(self, x)

    def plain_weight(self) -> Any:
        """float64 W (N, K)."""
        return np.asarray(self.weight.numpy(), np.float64)


class LoraLowBitLinear(LowBitLinear):
    """The same over a layer whose weight is kept in few bits, which stay as they are (Dettmers et al. 2023)."""

    def __init__(self, layer: LowBitLinear, rank: int, alpha: float):
        vars(self).update(vars(layer))
        give_adapter(self, (layer.outputs, layer.inputs), rank, alpha)

    def forward(self, x: Any) -> Tensor:
        y: Tensor = LowBitProduct.apply(x, self.bias, layer=self) + added(self, x)
        return y if self.after is None else self.after(y)

    def plain_weight(self) -> Any:
        """float64 (N, K) of what its bits stand for."""
        return self.dequantized().astype(np.float64)


def give_adapter(layer: Any, shape: Sequence[int], rank: int, alpha: float) -> None:
    """An adapter without memory for a layer with a weight of this shape (N, K)."""
    outputs, inputs = shape
    layer.adapter_scale = alpha / rank
    layer.down = nn.Parameter((rank, inputs), init.normal(1 / math.sqrt(inputs)))
    layer.up = nn.Parameter((outputs, rank), init.zeros)


def added(layer: Any, x: Any) -> Tensor:
    """What the adapter of a layer adds: scale * (x @ down.T) @ up.T."""
    return ops.linear(ops.linear(x, layer.down) * layer.adapter_scale, layer.up)


def merged_weight(layer: Any) -> Any:
    """W + scale * up @ down (N, K), computed in float64 and rounded once."""
    down, up = (np.asarray(p.numpy(), np.float64) for p in (layer.down, layer.up))
    return (layer.plain_weight() + layer.adapter_scale * (up @ down)).astype(layer.up.dtype)


def attach(model: nn.Module, rank: int, alpha: float, patterns: Sequence[str]) -> None:
    """Gives adapters to the linear layers that the patterns name, before the model has memory.

    ConfigError, by name, for a pattern without a linear layer, a weight that another layer uses too, and too large a rank.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear | LowBitLinear)}
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in layers):
            raise ConfigError(f'lora.layers: no linear layer is called "{pattern}"{nearest(pattern, layers)}')
    for path, layer in layers.items():
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            if why := why_alone(model, path, layer, (nn.Linear, LowBitLinear)):
                raise ConfigError(f"lora.layers: {why}; name other layers")
            outputs, inputs = (layer.outputs, layer.inputs) if isinstance(layer, LowBitLinear) else layer.weight.global_shape
            if rank > min(outputs, inputs):
                raise ConfigError(f'lora.rank = {rank} is more than the rank of "{path}", whose weight is ({outputs}, {inputs}); '
                                  f"set it to {min(outputs, inputs)} at most")
            made = LoraLowBitLinear(layer, rank, alpha) if isinstance(layer, LowBitLinear) else LoraLinear(layer, rank, alpha)
            exchange(model, layer, made)
    for name, _ in model.named_parameters():
        owner, _, part = name.rpartition(".")
        if is_part(patterns, name) and not isinstance(dict(model.named_modules())[owner], LoraLinear | LoraLowBitLinear):
            raise ConfigError(f'lora.layers names "{owner}" too, which has a parameter "{part}" of its own, as adapters have; '
                              "name the linear layers alone")


def why_alone(model: nn.Module, path: str, layer: Any, kinds: Sequence[type[nn.Module]] = (nn.Linear,)) -> str:
    """Why a layer is left as it is, by name: another uses its weight too, or it computes in a way of its own; "" otherwise."""
    weight = vars(layer).get("weight")
    users = [other for other, module in model.named_modules() if any(value is weight for value in vars(module).values())]
    if weight is not None and len(users) > 1:
        other = next(name for name in users if name != path)
        return f'"{path}" has one weight with "{other}", and a change of one would part them'
    if isinstance(layer, RoundedLinear):
        return f'"{path}" rounds its weight, as long as shrink.quantize is set'
    if type(layer) not in kinds or weight is None:
        names = " or ".join(kind.__name__ for kind in kinds)
        return f'"{path}" is a {type(layer).__name__}, which computes in a way of its own, not a {names}'
    return ""


def is_part(patterns: Sequence[str], name: str) -> bool:
    """Whether a parameter is called as one of an adapter of the layers that the patterns name."""
    path, _, part = name.rpartition(".")
    return part in PARTS and any(fnmatchcase(path, pattern) for pattern in patterns)


def in_few_bits(model: nn.Module) -> list[str]:
    """The layers whose adapters are beside weights in few bits."""
    return [path for path, layer in model.named_modules() if isinstance(layer, LoraLowBitLinear)]


def merge(adapted: nn.Module, plain: nn.Module) -> None:
    """Gives `plain`, the same model without adapters, the values of `adapted`, with its adapters added to the weights."""
    values = {name: leaf.numpy() for name, leaf in (*adapted.named_parameters(), *adapted.named_buffers())}
    values |= {f"{path}.weight": merged_weight(layer) for path, layer in adapted.named_modules()
               if isinstance(layer, LoraLinear | LoraLowBitLinear)}
    for name, leaf in (*plain.named_parameters(), *plain.named_buffers()):
        leaf.master[...] = values[name]
        leaf.mark_changed()
