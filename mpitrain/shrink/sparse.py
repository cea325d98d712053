"""A pruned model at work, and one that trains with masks that stay: layers whose zeros pay compute with what is left.

    saved = load("runs/pruned")
    for change in sparsify(saved.model):
        print(change)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpitrain import nn
from mpitrain.kernels.sparse import HEIGHT, live_blocks
from mpitrain.nn.sparse import LEAST_SIZE, BlockLinear, Blocks, SparseLinear, blocks_pay, form_that_pays
from mpitrain.shrink.exchange import exchange
from mpitrain.shrink.masks import Masks


class Sparsified(NamedTuple):
    """A linear layer, the share of zeros in its weight, and the form that it computes with now ("": as before)."""

    name: str
    zeros: float
    form: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name}: {self.zeros:.1%} zeros, " + (f"{self.form}, {self.nbytes:,} bytes" if self.form else "stays dense")


def sparsify(model: nn.Module, least: int = LEAST_SIZE) -> list[Sparsified]:
    """Puts a `SparseLinear` for each linear layer of a model with memory where its zeros pay; what was done with each.

    Names, parameters and hashes stay. Layers of other kinds (convolutions), those that ranks share, and those with fewer weights
    than `least` stay as they are.
    """
    found = []
    for name, layer in linear_layers(model):
        w = layer.weight.array
        form = form_that_pays(w, least) if isinstance(w, np.ndarray) else ""
        zeros, size = 1 - np.count_nonzero(w) / max(1, w.size), int(w.nbytes)
        if form:
            sparse = SparseLinear(layer, form)
            exchange(model, layer, sparse)
            size = sparse.sparse.nbytes
        found.append(Sparsified(name, float(zeros), form, size))
    return found


def fix_blocks(model: nn.Module, masks: Masks) -> list[str]:
    """Puts a `BlockLinear` for each linear layer of a model in training whose mask has blocks that pay; their names. Masks must
    stay as they are from then on."""
    found = []
    for name, layer in linear_layers(model):
        if (key := layer.weight.key) in masks.bits and layer.weight.shape[0] % HEIGHT == 0:
            live = live_blocks(masks.marks(key))
            if blocks_pay(live):
                exchange(model, layer, BlockLinear.of(layer, Blocks.of(live)))
                found.append(name)
    return found


def linear_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The layers below the model that are `nn.Linear` and nothing else, and whole on this rank."""
    return [(name, layer) for name, layer in model.named_modules()
            if type(layer) is nn.Linear and name and layer.across is None and layer.weight.shape == layer.weight.global_shape]
