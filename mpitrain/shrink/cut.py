"""Cut channels: the least important ones leave a model, with all rows and columns of parameters that depend on them.

    graph = trace(saved.model, rows)
    chosen = choose(saved.model, graph, work=0.5)
    smaller = build(**chosen.sizes);  transfer(saved.model, smaller, chosen, rows)

A channel's importance is the L2 norm over all the parameters that go with it, as a share of its group's (Li et al. 2017; Fang et
al. 2023). The least important of a group leave first, from the group that then keeps the largest share, until the multiply-adds
are few enough; equal ones by group and index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.autograd import no_grad
from mpitrain.errors import ShapeError, UsageError
from mpitrain.shrink.graph import Graph, Group, Key, Places, Product

COLUMNS = 8                    # channels that a kernel computes together: groups of twice as many have multiples of it
CLOSE = 1e-4                   # of the largest output: sums without their zeros round otherwise, a wrong channel moves far more


@dataclass(frozen=True)
class Chosen:
    """What stays of a model: `kept` has the indices of each dim that is cut, `sizes` the keys of [model], which were `before`,
    and `left` says why other channels stay."""

    kept: Mapping[Key, Places]
    sizes: Mapping[str, list[int]]
    before: Mapping[str, list[int]]
    work: float                                   # the share of multiply-adds that stays
    left: tuple[str, ...]


def choose(model: nn.Module, graph: Graph, work: float) -> Chosen:
    """The channels to keep so that at most the share `work` of the multiply-adds of layers and convolutions is left.

    UsageError where no channel of the model can go, or not enough of them can.
    """
    values = model.state_dict()
    strange = [layer for layers in model.size_keys.values() for layer in layers if f"{layer}.weight" not in values]
    if strange:
        raise UsageError(f"{strange[0]} has no floating-point weight of its own (it is in few bits, factored or adapted); cut "
                         "the run first, and make that of what is left")
    if not 0 < work < 1:
        raise UsageError(f"the share of the work that stays must be more than 0 and less than 1, found {work:g}")
    free = _free(model, graph)
    left = tuple(_left(model, graph, free))
    if not free:
        raise UsageError(f"no channels of this model can go: {'; '.join(left) or 'it has no linear layers or convolutions'}")
    ranked = {layer: _ranked(group, values) for layer, group in free.items()}
    sizes = {layer: group.size for layer, group in free.items()}
    whole = _work(graph.products, {})
    while (now := _work(graph.products, _counts(free, sizes)) / whole) > work:
        steps = [(float(ranked[layer][1][:smaller].sum()), layer, smaller) for layer, size in sizes.items()
                 if (smaller := _smaller(size, free[layer].size)) < size]
        if not steps:
            raise UsageError(f"{work:g} of the work cannot be reached: {now:.3f} is left at the smallest sizes"
                             + (f"; {'; '.join(left)}" if left else ""))
        _, layer, sizes[layer] = max(steps, key=lambda step: step[0])
    stay = {layer: np.sort(ranked[layer][0][:size]) for layer, size in sizes.items()}
    kept = {key: np.sort(places[stay[layer]], axis=None) for layer, group in free.items()
            for key, places in group.members.items()}
    before = {key: [_rows(model, layer) for layer in layers] for key, layers in model.size_keys.items()}
    after = {key: [sizes.get(layer, _rows(model, layer)) for layer in layers] for key, layers in model.size_keys.items()}
    return Chosen(kept, after, before, now, left)


def transfer(model: nn.Module, smaller: nn.Module, chosen: Chosen, rows: Any) -> None:
    """Gives `smaller`, which is initialised, the parameters that stay of `model`, and compares the outputs for some rows with
    those of `model` with zeros for what goes: ShapeError unless they agree."""
    smaller.load_state_dict({name: value[_kept(name, value, chosen)] for name, value in model.state_dict().items()})
    smaller.eval()
    own = {name: leaf.array for name, leaf in (*model.named_parameters(), *model.named_buffers())}
    saved = {name: own[name].copy() for name, _ in chosen.kept}
    try:
        for name, dim in chosen.kept:
            goes = np.ones(own[name].shape[dim], bool)
            goes[chosen.kept[name, dim]] = False
            own[name][(slice(None),) * dim + (goes,)] = 0
        with no_grad():
            expected, found = model(rows).numpy(), smaller(rows).numpy()
    finally:
        for name, values in saved.items():
            own[name][...] = values
    if expected.shape != found.shape or not _close(expected, found):
        raise ShapeError("the cut model does not compute what the model with zeros does: a rule of channels is wrong, or the "
                         "model computes with NumPy outside of operations; its channels cannot be cut")


def _close(expected: Any, found: Any) -> bool:
    return bool(np.abs(expected - found).max(initial=0) <= CLOSE * max(np.abs(expected).max(initial=0), 1e-30))


def _kept(name: str, value: Any, chosen: Chosen) -> Any:
    everything = [chosen.kept.get((name, dim), np.arange(n)) for dim, n in enumerate(value.shape)]
    return np.ix_(*everything) if everything else ()


def _rows(model: nn.Module, layer: str) -> int:
    return int(model.state_dict()[f"{layer}.weight"].shape[0])


def _free(model: nn.Module, graph: Graph) -> dict[str, Group]:
    """The groups that a key of [model] gives the size of, by the layer that makes the channels."""
    makes = {name: group for group in graph.groups if not group.why for name, dim in group.members if dim == 0}
    layers = [layer for names in model.size_keys.values() for layer in names]
    return {layer: makes[f"{layer}.weight"] for layer in layers
            if f"{layer}.weight" in makes and makes[f"{layer}.weight"].size == _rows(model, layer)}


def _left(model: nn.Module, graph: Graph, free: Mapping[str, Group]) -> Iterable[str]:
    chosen = [id(group) for group in free.values()]
    for group in graph.groups:
        if id(group) not in chosen and any(dim == 0 for _, dim in group.members):
            yield f"{group.size} channels of {group.name} stay: {group.why or 'no key of [model] gives their number'}"


def _ranked(group: Group, values: Mapping[str, Any]) -> tuple[Places, Any]:
    """The channels, the most important first, and their shares of the importance; of equal ones the first."""
    squares = np.zeros(group.size)
    for (name, dim), places in group.members.items():
        if not name.endswith(("running_mean", "running_var")):
            array = np.moveaxis(np.asarray(values[name], np.float64), dim, 0)
            squares += np.square(array).reshape(len(array), -1).sum(axis=1)[places].sum(axis=1)
    norms = np.sqrt(squares)
    order = np.argsort(-norms, kind="stable")
    return order, norms[order] / max(norms.sum(), 1e-300)


def _smaller(size: int, first: int) -> int:
    """The next smaller size of a group that had `first` channels: a multiple of 8, or one less in a group of fewer than 16."""
    if first >= 2 * COLUMNS:
        return max((size - 1) // COLUMNS * COLUMNS, COLUMNS)
    return max(size - 1, math.ceil(first / 4))


def _counts(free: Mapping[str, Group], sizes: Mapping[str, int]) -> dict[Key, int]:
    return {key: sizes[layer] * places.shape[1] for layer, group in free.items() for key, places in group.members.items()}


def _work(products: Iterable[Product], counts: Mapping[Key, int]) -> int:
    """Multiply-adds of a sample."""
    return sum(p.positions * math.prod([counts.get((p.name, dim), n) for dim, n in enumerate(p.shape)]) for p in products)
