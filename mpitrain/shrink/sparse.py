"""A pruned model at work: layers whose zeros pay compute with what is left.

    saved = load("runs/pruned")
    for change in sparsify(saved.model):
        print(change)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpitrain import nn
from mpitrain.nn.sparse import SparseLinear, form_that_pays


class Sparsified(NamedTuple):
    """A linear layer, the share of zeros in its weight, and the form that it computes with now ("": as before)."""

    name: str
    zeros: float
    form: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name}: {self.zeros:.1%} zeros, " + (f"{self.form}, {self.nbytes:,} bytes" if self.form else "stays dense")


def sparsify(model: nn.Module) -> list[Sparsified]:
    """Puts a `SparseLinear` for each linear layer of a model with memory where its zeros pay; what was done with each.

    Names, parameters and hashes stay. Layers of other kinds (convolutions) stay as they are.
    """
    found = []
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name and layer.across is None:
            w = layer.weight.array
            form = form_that_pays(w) if isinstance(w, np.ndarray) else ""
            zeros, size = 1 - np.count_nonzero(w) / max(1, w.size), int(w.nbytes)
            if form:
                sparse = SparseLinear(layer, form)
                sparse.train(layer.training)
                for parent in list(model.modules()):          # of a layer that several use, each of them
                    parent.replace(layer, sparse)
                size = sparse.sparse.nbytes
            found.append(Sparsified(name, float(zeros), form, size))
    return found
