"""Which channels of a model depend on each other: groups of rows of parameters that go together or not at all.

The model runs once on two rows and is recorded (`autograd.record`). A rule for each Function says which indices of its inputs and
outputs mean the same channel; connected indices (union-find) are one unit, and units of the same parameters are a group, as in
DepGraph (Fang et al. 2023). A Function without a rule fixes all dims of its arrays: nothing that it reads or makes is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpitrain.autograd import Operation, Value

Rule: TypeAlias = "Callable[[Relations, Operation], None]"
Key: TypeAlias = tuple[str, int]                 # the name of a parameter or buffer, and one of its dims
Places: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

SAMPLES = 2                                      # that a model is recorded on

RULES: dict[type[Any], Rule] = {}
"""Function -> how its dims relate; those of its base classes apply to a Function without one of its own."""


def relates(*functions: type[Any]) -> Callable[[Rule], Rule]:
    """Enters the rule of some Functions, a user's too: ``rule(relations, operation)`` calls `link` and `fix`."""
    def add(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, rule))
        return rule
    return add


@dataclass(frozen=True)
class Group:
    """Channels that are alike: unit u has the places ``members[key][u]`` in dim ``key[1]`` of the array ``key[0]``.

    `why` says why none of them can go; it is empty where they can.
    """

    members: Mapping[Key, Places]
    why: str

    @property
    def size(self) -> int:
        return len(next(iter(self.members.values())))

    @property
    def name(self) -> str:
        """The array whose rows it has, or whose columns."""
        return next((name for name, dim in self.members if dim == 0), next(iter(self.members))[0])


class Product(NamedTuple):
    """A linear layer or convolution: `positions` products of a sample with the weight `name` of this shape, or with one that is
    computed, which has no name.

    Of each input channel it reads `places` numbers. `turned`: a convolution that may be computed in turned tiles.
    """

    name: str
    shape: tuple[int, ...]
    positions: int
    places: int
    turned: bool = False


class Graph(NamedTuple):
    groups: tuple[Group, ...]
    products: tuple[Product, ...]
    uncounted: tuple[str, ...] = ()               # lines on operations with matrices whose multiply-adds are not in `products`


class Relations:
    """The connected indices of all dims of all arrays."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[Value, int], int] = {}
        self._parent: list[int] = []
        self._why: dict[int, str] = {}            # a fixed index -> the reason
        self.products: list[Product] = []
        self.reshaped: dict[Value, Value] = {}    # what has a parameter's rows, and other dims behind them -> the parameter
        self.uncounted: dict[str, None] = {}      # in order

    def _places(self, value: Value, dim: int) -> range:
        dim %= len(value.shape)
        if (value, dim) not in self._firsts:
            self._firsts[value, dim] = len(self._parent)
            self._parent.extend(range(len(self._parent), len(self._parent) + value.shape[dim]))
        first = self._firsts[value, dim]
        return range(first, first + value.shape[dim])

    def _root(self, place: int) -> int:
        while self._parent[place] != place:
            self._parent[place] = place = self._parent[self._parent[place]]
        return place

    def link(self, a: Value, dim_a: int, b: Value, dim_b: int, *, start: int = 0, run: int = 1) -> None:
        """Index i of `a` is the same channel as those from ``start + i * run`` on, `run` of them, of `b`."""
        places = self._places(b, dim_b)
        for i, place in enumerate(self._places(a, dim_a)):
            for other in places[start + i * run:start + (i + 1) * run]:
                self._parent[self._root(place)] = self._root(other)

    def whole(self, value: Value, dim: int, run: int) -> None:
        """Each `run` neighbouring indices are one channel, such as a head."""
        places = self._places(value, dim)
        for i, place in enumerate(places):
            self._parent[self._root(place)] = self._root(places[i // run * run])

    def fix(self, value: Any, why: str, *dims: int) -> None:
        """None of these dims of an array (of all, if none is given) may be cut."""
        if isinstance(value, Value):
            for dim in dims or range(len(value.shape)):
                self._why.update((place, why) for place in self._places(value, dim) if place not in self._why)

    def multiply(self, x: Value, channels: int, weight: Value, y: Value, turned: bool = False) -> None:
        """y is x, whose dim `channels` is gone through, times a weight (outputs, ...); dim 0 may have windows of samples."""
        weight = self.reshaped.get(weight, weight)
        positions, places = (-(-math.prod(value.shape) // (n * SAMPLES)) for value, n in (
            (y, weight.shape[0]), (x, x.shape[channels])))
        self.products.append(Product(weight.name, weight.shape, positions, places, turned))

    def groups(self) -> tuple[Group, ...]:
        """The groups, in the order in which the model uses their parameters."""
        why: dict[int, str] = {}
        for place, reason in self._why.items():
            why.setdefault(self._root(place), reason)
        units: dict[int, dict[Key, list[int]]] = {}
        for (value, dim), first in self._firsts.items():
            if value.name:
                for i in range(value.shape[dim]):
                    units.setdefault(self._root(first + i), {}).setdefault((value.name, dim), []).append(i)
        alike: dict[Any, list[dict[Key, list[int]]]] = {}
        for root, unit in units.items():
            kind = tuple((key, len(places)) for key, places in unit.items()), why.get(root, "")
            alike.setdefault(kind, []).append(unit)
        return tuple([Group({key: np.array([unit[key] for unit in found]) for key, _ in kind}, reason)
                      for (kind, reason), found in alike.items()])


def lines(graph: Graph) -> list[str]:
    """A line for each group: its size, its members, and why it stays."""
    found = []
    for group in graph.groups:
        named = {name: [dim for _, dim in keys] for name, keys in groupby(group.members, key=lambda key: key[0])}
        members = ", ".join(f"{name}:{'/'.join(map(str, dims))}" for name, dims in named.items())
        found.append(f"{group.size} {members}" + (f" ({group.why})" if group.why else ""))
    return found
