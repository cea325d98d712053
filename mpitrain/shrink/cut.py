"""Cut channels: the least important ones leave a model, with all rows and columns of parameters that depend on them.

    graph = trace(saved.model, rows)
    chosen = choose(saved.model, graph, norms(saved.model, graph), work=0.5)
    smaller = a model with chosen.sizes or chosen.shapes;  transfer(saved.model, smaller, chosen, rows)

The least important of a group leave first. Which group loses some next is the one whose logarithm of the share of importance that
stays falls least for what the kernels save by it (`costs`), until the multiply-adds are few enough; of equal ones
the first. What is not needed of the last steps for that, groups get back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpitrain import nn
from mpitrain.autograd import no_grad
from mpitrain.errors import MpitrainError, ShapeError, UsageError
from mpitrain.shrink.costs import COLUMNS, cost, work
from mpitrain.shrink.graph import Graph, Group, Key, Places, Product
from mpitrain.shrink.importance import Importance

CLOSE = 1e-4                   # of the largest output: sums without their zeros round otherwise, a wrong channel moves far more
WRONG = ("the cut model does not compute what the model with zeros does: a rule of channels is wrong, or the model computes with "
         "NumPy outside of operations, or with sizes of its own; its channels cannot be cut")


@dataclass(frozen=True)
class Chosen:
    """What stays of a model: `kept` has the indices of each dim that is cut. Either `sizes` has the keys of [model] that say so,
    and `before` what they were, or `shapes` those of parameters and buffers. `left` says why other channels stay."""

    kept: Mapping[Key, Places]
    work: float                                   # the share of multiply-adds that stays
    left: tuple[str, ...]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, list[int]] = field(default_factory=dict)


class Free(NamedTuple):
    """A group that can lose channels: the most important first, the share of importance of so many of them, its products."""

    group: Group
    order: Places
    shares: Any                                   # shares[n]: that of the first n
    products: Sequence[Product]
    whole: bool                                   # a channel is many rows: a head

    @property
    def step(self) -> int:
        """Sizes are multiples of 8, but of heads, and in a group that had fewer than 16 channels."""
        return 1 if self.whole or self.group.size < 2 * COLUMNS else COLUMNS

    def smaller(self, size: int) -> int:
        least = math.ceil(self.group.size / 4) if self.step == 1 else COLUMNS
        return max((size - 1) // self.step * self.step, least)

    def larger(self, size: int) -> int:
        return min((size // self.step + 1) * self.step, self.group.size)

    def counts(self, counts: Mapping[Key, int], size: int, other: int) -> dict[Key, int]:
        """`counts` with `other` channels of this group in the place of `size`; a dim may have channels of several groups."""
        return {**counts, **{key: counts[key] + (other - size) * places.shape[1] for key, places in self.group.members.items()}}


def choose(model: nn.Module, graph: Graph, importance: Importance, work_left: float) -> Chosen:
    """The channels to keep so that at most the share `work_left` of the multiply-adds of layers and convolutions is left.

    UsageError where no channel of the model can go, or not enough of them can.
    """
    if not 0 < work_left < 1:
        raise UsageError(f"the share of the work that stays must be more than 0 and less than 1, found {work_left:g}")
    free = {layer: _ranked(group, graph.products, importance(group)) for layer, group in _free(model, graph).items()}
    left = tuple(_left(graph, [one.group for one in free.values()], bool(model.size_keys))) + graph.uncounted
    if not free:
        raise UsageError(f"no channels of this model can go: {'; '.join(left) or 'it has no linear layers or convolutions'}")
    sizes = {layer: one.group.size for layer, one in free.items()}
    whole, counts = work(graph.products, {}), _counts(graph)
    while (now := work(graph.products, counts) / whole) > work_left:
        step = _cheapest(free, sizes, counts)
        if step is None:
            raise UsageError(f"{work_left:g} of the work cannot be reached: {now:.3f} is left at the smallest sizes"
                             + (f"; {'; '.join(left)}" if left else ""))
        counts, sizes[step[0]] = free[step[0]].counts(counts, sizes[step[0]], step[1]), step[1]
    while (step := _dearest(free, sizes, counts, lambda counts: work(graph.products, counts) <= work_left * whole)) is not None:
        counts, sizes[step[0]] = free[step[0]].counts(counts, sizes[step[0]], step[1]), step[1]
    now = work(graph.products, counts) / whole
    kept = _stay(free, sizes, _counts(graph))
    if not model.size_keys:
        before = {name: list(value.shape) for name, value in model.state_dict().items()}
        shapes = {name: [counts.get((name, dim), n) for dim, n in enumerate(shape)] for name, shape in before.items()}
        return Chosen(kept, now, left, shapes={name: shape for name, shape in shapes.items() if shape != before[name]})
    outputs = {key: [_outputs(model, layer) for layer in layers] for key, layers in model.size_keys.items()}
    after = {key: [sizes.get(layer, n) for layer, n in zip(layers, outputs[key], strict=True)]
             for key, layers in model.size_keys.items()}
    return Chosen(kept, now, left, {**model.sized_with, **after}, outputs)


def _cheapest(free: Mapping[str, Free], sizes: Mapping[str, int], counts: Mapping[Key, int]) -> tuple[str, int] | None:
    """The layer that loses channels next, and its next size; None where all are at their smallest."""
    found = [(_loss(one, sizes[layer], smaller, counts), layer, smaller) for layer, one in free.items()
             if (smaller := one.smaller(sizes[layer])) < sizes[layer]]
    return min(found, key=lambda step: step[0])[1:] if found else None


def _dearest(free: Mapping[str, Free], sizes: Mapping[str, int], counts: Mapping[Key, int],
             fits: Callable[[Mapping[Key, int]], bool]) -> tuple[str, int] | None:
    """The layer that gets channels back, and how many it has then; None where there is no room for any."""
    found = [(_loss(one, larger, sizes[layer], more), layer, larger) for layer, one in free.items()
             if (larger := one.larger(sizes[layer])) > sizes[layer] and fits(more := one.counts(counts, sizes[layer], larger))]
    return max(found, key=lambda step: step[0])[1:] if found else None


def _loss(one: Free, size: int, smaller: int, counts: Mapping[Key, int]) -> float:
    """What the logarithm of the importance that stays falls by for each unit of cost that is saved."""
    saved = cost(one.products, counts) - cost(one.products, one.counts(counts, size, smaller))
    return math.log(max(one.shares[size], 1e-300) / max(one.shares[smaller], 1e-300)) / max(saved, 1.0)


def transfer(model: nn.Module, smaller: nn.Module, chosen: Chosen, rows: Any) -> None:
    """Gives `smaller`, which is initialised, the parameters that stay of `model`, and compares the outputs for some rows with
    those of `model` with zeros for what goes: ShapeError unless they agree."""
    smaller.load_state_dict({name: value[_kept(name, value, chosen)] for name, value in model.state_dict().items()})
    smaller.eval()
    rounds = [(leaf, leaf.operands) for leaf in (*model.parameters(), *smaller.parameters())]
    for leaf, _ in rounds:
        leaf.operands = ""                        # what bfloat16 rounds differs by more than sums in another order
    own = {name: leaf.array for name, leaf in (*model.named_parameters(), *model.named_buffers())}
    saved = {name: own[name].copy() for name, _ in chosen.kept}
    try:
        for name, dim in chosen.kept:
            goes = np.ones(own[name].shape[dim], bool)
            goes[chosen.kept[name, dim]] = False
            own[name][(slice(None),) * dim + (goes,)] = 0
        with no_grad():
            expected, found = model(rows).numpy(), _output(smaller, rows)
    finally:
        for name, values in saved.items():
            own[name][...] = values
        for leaf, operands in rounds:
            leaf.operands = operands
    if expected.shape != found.shape or not _close(expected, found):
        raise ShapeError(WRONG)


def _output(smaller: nn.Module, rows: Any) -> Any:
    """Of a model whose code may have sizes that its layers no longer have."""
    try:
        return smaller(rows).numpy()
    except (MpitrainError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        said = error.message if isinstance(error, MpitrainError) else str(error)
        raise ShapeError(f"{WRONG} ({said})") from error


def _close(expected: Any, found: Any) -> bool:
    return bool(np.abs(expected - found).max(initial=0) <= CLOSE * max(np.abs(expected).max(initial=0), 1e-30))


def _kept(name: str, value: Any, chosen: Chosen) -> Any:
    everything = [chosen.kept.get((name, dim), np.arange(n)) for dim, n in enumerate(value.shape)]
    return np.ix_(*everything) if everything else ()


def _outputs(model: nn.Module, layer: str) -> int:
    """The outputs of a layer, or of one that makes heads' queries, keys and values the heads."""
    found: Any = dict(model.named_modules())[layer]
    unit = found.out_groups * found.out_unit if isinstance(found, nn.Linear) else 1
    return int(found.weight.shape[0]) // unit


def _free(model: nn.Module, graph: Graph) -> dict[str, Group]:
    """The groups that a key of [model] gives the size of, by the layer that makes the channels; without such keys all that can
    go, by their numbers."""
    makes = {name: group for group in graph.groups if not group.why for name, dim in group.members if dim == 0}
    if not model.size_keys:
        products = {p.name for p in graph.products}
        return {str(i): group for i, group in enumerate(graph.groups)
                if not group.why and any(name in products for name, _ in group.members)}
    layers = [layer for names in model.size_keys.values() for layer in names]
    return {layer: makes[f"{layer}.weight"] for layer in layers
            if f"{layer}.weight" in makes and makes[f"{layer}.weight"].size == _outputs(model, layer)}


def _left(graph: Graph, free: Iterable[Group], keyed: bool) -> Iterable[str]:
    chosen = [id(group) for group in free]
    for group in graph.groups:
        if id(group) not in chosen and any(dim == 0 for _, dim in group.members):
            why = group.why or ("no key of [model] gives their number" if keyed else "no layer has them in a weight of its own")
            yield f"{group.size} channels of {group.name} stay: {why}"


def _ranked(group: Group, products: Sequence[Product], importance: Any) -> Free:
    """Of equal channels the first are the more important."""
    order = np.argsort(-importance, kind="stable")
    shares = np.cumsum([0.0, *importance[order]]) / max(importance.sum(), 1e-300)
    own = [p for p in products if any(name == p.name for name, _ in group.members)]
    whole = any(places.shape[1] > 1 for (name, dim), places in group.members.items() if dim == 0)
    return Free(group, order, shares, own, whole)


def _counts(graph: Graph) -> dict[Key, int]:
    """The sizes of all dims, in which several groups may have channels."""
    counts: dict[Key, int] = {}
    for group in graph.groups:
        for key, places in group.members.items():
            counts[key] = counts.get(key, 0) + places.size
    return counts


def _stay(free: Mapping[str, Free], sizes: Mapping[str, int], wholes: Mapping[Key, int]) -> dict[Key, Places]:
    """The indices that stay of each dim that has channels of these groups."""
    kept: dict[Key, Places] = {}
    for layer, one in free.items():
        for key, places in one.group.members.items():
            kept[key] = np.setdiff1d(kept.get(key, np.arange(wholes[key])), places[one.order[sizes[layer]:]])
    return kept
