"""Masks of pruned weights: which elements of a rank's parameters are kept, as bytes that lie as the parameters do.

A mask is a function of the weights of the whole model. A rank keeps what belongs to the elements that it has, whole parameters or
slices of them, so masks are cut as parameters are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.errors import ConfigError, nearest
from mpitrain.nn.init import Shape
from mpitrain.nn.parameter import Described

INTEGERS = {4: "i4", 8: "i8"}


@dataclass
class Part:
    """The elements `first`, ... of this rank's part of a weight: flat, on the host. `counts`: no other rank counts them too."""

    leaf: Described
    first: int
    values: np.ndarray[Any, Any]
    kept: np.ndarray[Any, Any]
    counts: bool

    def indices(self) -> np.ndarray[Any, Any]:
        """The place of each element in the whole weight, counted in C order."""
        at = np.empty(self.values.size, np.int64)
        whole = self.leaf.global_shape
        for view, start in self.leaf.pieces(at, self.first):
            places = np.ogrid[tuple(slice(a, a + n) for a, n in zip(start, view.shape))]
            view[...] = sum(place * math.prod(whole[d + 1:]) for d, place in enumerate(places))
        return at


@dataclass
class Layer:
    """A weight of the whole model that is pruned, the same on all ranks, and the parts of it that this rank has."""

    name: str
    shape: Shape
    parts: list[Part] = field(default_factory=list)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def prunable(model: nn.Module, skip: Sequence[str] = ()) -> dict[str, Shape]:
    """The weights that may be pruned, by name: trained, of two dims or more, and no table of an embedding.

    ConfigError for a pattern of `skip` that matches no weight or layer.
    """
    tables = {id(p) for _, layer in model.named_modules() if isinstance(layer, nn.Embedding) for p in layer.parameters()}
    named = [(p.twin_of or name, p) for name, p in model.named_parameters()]      # A parameter of another stage has no name yet.
    of_tables = {name for name, p in named if id(p) in tables}
    found = {name: p.global_shape for name, p in named
             if len(p.global_shape) >= 2 and name not in of_tables and p.trained_from < math.inf}
    known = [*found, *(name.rpartition(".")[0] for name in found)]
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(f'shrink.skip = "{pattern}" names no weight that would be pruned{nearest(pattern, known)}')
    return {name: found[name] for name in sorted(found)
            if not any(fnmatchcase(name, p) or fnmatchcase(name.rpartition(".")[0], p) for p in skip)}


class Masks:
    """The masks of the weights `shapes` (by name; of the whole model) on the elements of `storage` that this rank has.

    `storage` is an `optim.optimizer.Storage`; `counts(parameter)` says whether this rank, of those with the same elements, counts
    them. All weights are kept at first.
    """

    def __init__(self, storage: Any, shapes: Mapping[str, Shape], counts: Callable[[Any], bool]):
        self.storage, self.shapes, self.counts = storage, dict(shapes), counts
        self.segments = [s for s in storage.segments if s.parameter.key in self.shapes]
        self.kept: Array = storage.device.xp.ones(storage.values.shape, "uint8")

    def views(self) -> Iterator[tuple[Any, Array]]:
        """Each segment that is pruned, with its part of the mask, flat."""
        return ((s, self.kept[s.start:s.stop]) for s in self.segments)

    def layers(self) -> list[Layer]:
        """All weights, in one order on all ranks, with copies of this rank's values; what is written to `kept` there is the mask
        after `take`."""
        found = {name: Layer(name, shape) for name, shape in self.shapes.items()}
        for s, kept in self.views():
            found[s.parameter.key].parts.append(Part(s.parameter, s.first, asnumpy(self.storage.values[s.start:s.stop]),
                                                     np.ones(kept.size, np.uint8), self.counts(s.parameter)))
        return list(found.values())

    def take(self, layers: Sequence[Layer]) -> None:
        """The masks become those of `layers`."""
        parts = {(part.leaf.name, part.first): part.kept for layer in layers for part in layer.parts}
        for s, kept in self.views():
            kept[...] = array_module(kept).asarray(parts[s.parameter.name, s.first])

    def apply(self, segments: Sequence[Any] | None = None) -> None:
        """Zeros where the weights of `segments` (default: all) are pruned. A product of whole numbers: no NaN, and no -0."""
        for s in self.segments if segments is None else segments:
            if s.parameter.key in self.shapes and s.stop > s.start:
                values = self.storage.values[s.start:s.stop]
                whole = values.view(INTEGERS[values.dtype.itemsize])
                whole *= self.kept[s.start:s.stop]
                s.parameter.mark_changed()

    def zeros(self) -> dict[str, int]:
        """How many elements of each weight are pruned, of those that this rank counts."""
        found = dict.fromkeys(self.shapes, 0)
        for s, kept in self.views():
            if self.counts(s.parameter):
                found[s.parameter.key] += int(kept.size) - int(kept.sum(dtype="int64"))
        return found
