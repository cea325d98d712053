"""Linear layers and convolutions as products of two smaller ones, by the singular value decomposition (Denton et al. 2014).

The best approximation of rank r of a weight W (N, K), in the sum of squares (Eckart and Young 1936), is a product (N, r) (r, K),
which has fewer numbers where r (N + K) < N K. A convolution's K is input channels times the window: it becomes one to r channels
with the window, and one of 1 x 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from mpitrain import nn, ops
from mpitrain.autograd import Tensor
from mpitrain.backend import Array
from mpitrain.errors import ConfigError, NumericsError, UsageError, nearest
from mpitrain.nn import init
from mpitrain.nn.conv import Conv2d
from mpitrain.shrink.exchange import exchange
from mpitrain.shrink.graph import Product
from mpitrain.shrink.lora import why_alone

HALVINGS = 200                                    # of the price of a multiply-add, from which ranks follow


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


class FactoredConv2d(Conv2d):
    """(B, C, H, W) to (B, N, H', W'): a convolution with down (r, C, kh, kw), then one with weight (N, r, 1, 1) and the bias."""

    def __init__(self, layer: Conv2d, rank: int):
        vars(self).update(vars(layer))
        outputs, *window = layer.weight.global_shape
        self.down = nn.Parameter((rank, *window), init.normal(1 / math.sqrt(math.prod(window))))
        self.weight = nn.Parameter((outputs, rank, 1, 1), init.normal(1 / math.sqrt(rank)))

    def forward(self, x: Any) -> Tensor:
        y: Tensor = ops.conv2d(self.convolve(x, None, self.down), self.weight, self.bias)
        return y


KINDS: dict[type[nn.Module], type[Any]] = {nn.Linear: FactoredLinear, Conv2d: FactoredConv2d}


def layers_of(model: nn.Module) -> dict[str, Any]:
    """The linear layers and convolutions of images, by name."""
    return {path: module for path, module in model.named_modules() if isinstance(module, tuple(KINDS))}


def _why_not(model: nn.Module, path: str, layer: Any) -> str:
    """Why a layer cannot be two; "" where it can."""
    parent = dict(model.named_modules()).get(path.rpartition(".")[0])
    if isinstance(layer, Conv2d) and layer.groups > 1:
        return f'"{path}" is a convolution of {layer.groups} groups'
    if isinstance(parent, nn.MixtureOfExperts):
        return f'"{path}" belongs to a mixture of experts, which computes with its weight'
    return why_alone(model, path, layer, tuple(KINDS))


def attach(model: nn.Module, ranks: Mapping[str, Any]) -> None:
    """Gives the model factored layers of these ranks, by name, before it has memory. ConfigError, by name, where it cannot be."""
    layers = layers_of(model)
    for path, rank in ranks.items():
        if path not in layers:
            raise ConfigError(f'model.ranks: no linear layer or convolution is called "{path}"{nearest(path, layers)}')
        least = min(_matrix(layers[path]))
        if type(rank) is not int or not 1 <= rank <= least:
            raise ConfigError(f'model.ranks: the rank of "{path}" is an integer of 1 to {least}, found {rank!r}')
        if why := _why_not(model, path, layers[path]):
            raise ConfigError(f"model.ranks: {why}; name other layers")
        exchange(model, layers[path], KINDS[type(layers[path])](layers[path], rank))


class Layer(NamedTuple):
    """A layer that can be two, its singular values' shares of the energy that is lost below each rank, and its multiply-adds."""

    layer: Any
    lost: Array                                   # lost[r]: the share of the sum of squares beyond the first r values
    positions: int = 1

    @property
    def whole(self) -> int:
        return self.positions * math.prod(_matrix(self.layer))

    def work(self, rank: int) -> int:
        return self.positions * rank * sum(_matrix(self.layer))

    @property
    def most(self) -> int:
        """The largest rank with less work than the whole."""
        return (self.whole - 1) // self.work(1)


def candidates(model: nn.Module, patterns: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The layers that the patterns name and that can be two, and why others cannot.

    ConfigError for a pattern without a layer, and for a layer named by itself that cannot.
    """
    layers = layers_of(model)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in layers):
            raise ConfigError(f'--layers: no linear layer or convolution is called "{pattern}"{nearest(pattern, layers)}')
    found, left = {}, []
    for path, layer in layers.items():
        if any(fnmatchcase(path, pattern) for pattern in patterns):
            if not (why := _why_not(model, path, layer)):
                found[path] = layer
            elif path in patterns:
                raise ConfigError(f"--layers: {why}; name other layers")
            else:
                left.append(why)
    return found, left


def of_rank(layers: Mapping[str, Any], rank: int) -> dict[str, int]:
    """The same rank for each layer; those that would have as much work as before are left out."""
    return {path: rank for path, layer in layers.items() if rank <= Layer(layer, np.empty(0)).most}


def of_energy(layers: Mapping[str, Any], energy: float) -> dict[str, int]:
    """The least rank of each layer whose singular values have this share of the squares' sum; left out are layers as above."""
    found = {path: _spectrum(path, layer) for path, layer in layers.items()}
    ranks = {path: max(1, int(np.argmax(one.lost <= (1 - energy) + 1e-12))) for path, one in found.items()}
    return {path: rank for path, rank in ranks.items() if rank <= found[path].most}


def of_work(layers: Mapping[str, Any], products: Sequence[Product], share: float) -> tuple[dict[str, int], float]:
    """The ranks with which at most this share of the model's multiply-adds is left, and what is: each rank is where one more
    would win less of its layer's energy than a price for its work, which is the same for all (Lagrange).

    UsageError where the share cannot be reached.
    """
    uses = {path: [p for p in products if p.name == layer.weight.name] for path, layer in layers.items()}
    found = {path: _spectrum(path, layer, sum(p.positions for p in uses[path])) for path, layer in layers.items() if uses[path]}
    total = sum(p.positions * math.prod(p.shape) for p in products)
    rest = total - sum(one.whole for one in found.values())

    def left(ranks: Mapping[str, int]) -> float:
        return (rest + sum(one.work(ranks[path]) if path in ranks else one.whole for path, one in found.items())) / total
    if not found or left(dict.fromkeys(found, 1)) > share:
        raise UsageError(f"{share:g} of the work cannot be reached: {left(dict.fromkeys(found, 1)):.3f} is left with ranks of 1; "
                         "name more layers")
    low, high = 0.0, 1.0                          # the dearest is 1: a multiply-add for all the energy of a layer
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high) if low else high / 1e6
        if left(_at(found, middle)) <= share:
            high = middle
        else:
            low = middle
    ranks = _at(found, high)
    return ranks, left(ranks)


def _at(found: Mapping[str, Layer], price: float) -> dict[str, int]:
    """The rank of each layer at a price of a multiply-add; a layer that is whole loses nothing."""
    ranks = {}
    for path, one in found.items():
        if one.most:
            options = one.lost[1:one.most + 1] + price * one.work(1) * np.arange(1, one.most + 1)
            if options.min() < price * one.whole:
                ranks[path] = 1 + int(np.argmin(options))
    return ranks


def _matrix(layer: Any) -> tuple[int, int]:
    """(N, K) of its weight."""
    outputs, *inputs = layer.weight.global_shape
    return outputs, math.prod(inputs)


def _spectrum(path: str, layer: Any, positions: int = 1) -> Layer:
    weight = np.asarray(layer.weight.numpy(), np.float64).reshape(_matrix(layer))
    if not np.isfinite(weight).all():
        raise NumericsError(f'layer "{path}": the weight has NaN or infinite values, which have no factors; take another '
                            "checkpoint (--step)")
    squares = np.linalg.svd(weight, compute_uv=False) ** 2
    lost = np.maximum(squares.sum() - np.cumsum([0.0, *squares]), 0)
    return Layer(layer, lost / (squares.sum() or 1.0), positions)


def factor(model: nn.Module, factored: nn.Module) -> dict[str, float]:
    """Gives `factored`, the same model with factored layers, the values of `model`; the relative error of each weight.

    Each factor has the square roots of the singular values. Computed in float64, rounded once.
    """
    values = {name: leaf.numpy() for name, leaf in (*model.named_parameters(), *model.named_buffers())}
    errors: dict[str, float] = {}
    for path, layer in factored.named_modules():
        if isinstance(layer, (FactoredLinear, FactoredConv2d)) and f"{path}.down" not in values:
            whole, rank = np.asarray(values[f"{path}.weight"], np.float64), layer.down.shape[0]
            u, s, v = np.linalg.svd(whole.reshape(len(whole), -1), full_matrices=False)
            root = np.sqrt(s[:rank])
            values[f"{path}.weight"] = (u[:, :rank] * root).reshape(layer.weight.shape)
            values[f"{path}.down"] = (root[:, None] * v[:rank]).reshape(layer.down.shape)
            errors[path] = float(np.linalg.norm(s[rank:]) / (np.linalg.norm(s) or 1.0))
    for name, leaf in (*factored.named_parameters(), *factored.named_buffers()):
        leaf.master[...] = values[name]
        leaf.mark_changed()
    return errors
