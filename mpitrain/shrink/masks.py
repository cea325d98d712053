"""Masks of pruned weights: which elements are kept, a bit each.

A mask is a function of the weights of the whole model. A rank keeps the whole mask of each weight of which it has a part: bits
are few, and so no cut of a weight needs to end where a byte does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.backend import Array, asnumpy
from mpitrain.errors import ConfigError, nearest
from mpitrain.kernels.masks import keep_bits, marks_of, to_bits
from mpitrain.nn.init import Shape
from mpitrain.nn.parameter import Described
from mpitrain.shrink.select import Add


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
    """The masks of the weights `shapes` (by name; of the whole model); `storage` has the elements that this rank updates.

    `storage` is an `optim.optimizer.Storage`; `counts(parameter)` says whether this rank, of those with the same elements, counts
    them. All weights are kept at first.
    """

    def __init__(self, storage: Any, shapes: Mapping[str, Shape], counts: Callable[[Any], bool]):
        self.storage, self.shapes, self.counts = storage, dict(shapes), counts
        self.segments = [s for s in storage.segments if s.parameter.key in self.shapes]
        names = {s.parameter.key for s in self.segments}
        self.put({name: to_bits(np.ones(math.prod(shape), np.uint8)) for name, shape in self.shapes.items() if name in names})

    def put(self, bits: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """The masks become these, of the whole weights of which this rank has parts, by name."""
        self.bits = dict(bits)
        xp = self.storage.device.xp
        self._own: dict[str, Array] = {s.parameter.name: xp.asarray(self._cut(s.parameter)) for s in self.segments}

    def _cut(self, leaf: Described) -> np.ndarray[Any, Any]:
        """The bits of a parameter's part on this rank."""
        whole = self.bits[leaf.key]
        if leaf.shape == leaf.global_shape:
            return whole
        marks = self.marks(leaf.key)
        own: np.ndarray[Any, Any] = np.empty(leaf.shape, np.uint8)
        for box in leaf.boxes():
            own[box.own] = marks[tuple(slice(start, start + s.stop - s.start) for start, s in zip(box.start, box.own))]
        found: np.ndarray[Any, Any] = to_bits(own.reshape(-1))
        return found

    def marks(self, name: str) -> np.ndarray[Any, Any]:
        """1 where an element of a whole weight is kept, and 0 where it is pruned; for a weight of which this rank has a part."""
        shape = self.shapes[name]
        found: np.ndarray[Any, Any] = marks_of(self.bits[name], 0, math.prod(shape)).reshape(shape)
        return found

    def layers(self) -> list[Layer]:
        """All weights, in one order on all ranks, with copies of this rank's values; what is written to `kept` there is the mask
        after `take`."""
        found = {name: Layer(name, shape) for name, shape in self.shapes.items()}
        for s in self.segments:
            values = asnumpy(self.storage.values[s.start:s.stop])
            found[s.parameter.key].parts.append(Part(s.parameter, s.first, values, np.ones(values.size, np.uint8),
                                                     self.counts(s.parameter)))
        return list(found.values())

    def take(self, layers: Sequence[Layer], add: Add) -> None:
        """The masks become those of `layers`. It communicates: each element has a bit on the rank that counts it, and bits are
        added."""
        found = {}
        for layer in layers:
            marks = np.zeros(layer.shape, np.uint8)
            for part in layer.parts:
                if part.counts:
                    for view, start in part.leaf.pieces(part.kept, part.first):
                        marks[tuple(slice(a, a + n) for a, n in zip(start, view.shape))] = view != 0
            bits = np.zeros(-(-layer.size // 64) * 8, np.uint8)
            bits[:-(-layer.size // 8)] = to_bits(marks.reshape(-1))
            add(bits.view(np.int64))
            if layer.name in self.bits:
                found[layer.name] = bits[:-(-layer.size // 8)].copy()
        self.put(found)

    def apply(self, segments: Sequence[Any] | None = None) -> None:
        """Zeros where the weights of `segments` (default: all) are pruned."""
        chosen = self.segments if segments is None else segments
        self.clear((s, self.storage.values[s.start:s.stop]) for s in chosen)
        for s in chosen:
            if s.parameter.key in self.shapes:
                s.parameter.mark_changed()

    def clear(self, arrays: Iterable[tuple[Any, Array]]) -> None:
        """Zeros where the weight of a segment is pruned, in a flat array for each."""
        for s, values in arrays:
            if s.parameter.key in self.shapes and values.size:
                bits = self._own[s.parameter.name]
                keep_bits(values, asnumpy(bits) if type(values) is np.ndarray else bits, s.first)

    def zeros(self) -> dict[str, int]:
        """How many elements of each weight are pruned, of those that this rank counts."""
        found = dict.fromkeys(self.shapes, 0)
        for s in self.segments:
            if self.counts(s.parameter):
                n = s.stop - s.start
                found[s.parameter.key] += n - int(marks_of(self._own[s.parameter.name], s.first, n).sum(dtype="int64"))
        return found

    def written_here(self) -> dict[str, np.ndarray[Any, Any]]:
        """The bits of the weights whose first element is counted by this rank: of each weight on one rank."""
        return {s.parameter.key: self.bits[s.parameter.key] for s in self.segments
                if s.first == 0 and s.stop > s.start and not any(s.parameter.offset) and self.counts(s.parameter)}
