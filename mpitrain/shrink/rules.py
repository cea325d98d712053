"""Pruning rules: which weights of a model become zero. They write the masks of `Layer.parts`, the same on every rank.

The registry is `config.sections.PRUNERS`; a user's own is ``shrink.prune = "file.py:name"``, made with the keys of [shrink] that
its signature names (`pattern`, `scope`).
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError, MeshError
from mpitrain.nn.init import Shape
from mpitrain.nn.parameter import Described
from mpitrain.shrink.masks import Layer, Part
from mpitrain.shrink.select import Add, magnitude_bits, smallest

ONE = 1 << 32                                    # what 1.0 is where sizes of weights are added up as whole numbers
LARGEST = 1 << 20                                # weights beyond it count as this
MOST = 1 << 10                                   # elements of a block: their sum stays within 63 bits


class Rule(ABC):
    """A rule of pruning. `choose` sees all layers of the model with this rank's parts, and is called by all ranks alike."""

    why = ""                                     # the reason why a layer does not fit, for messages

    def fits(self, shape: Shape) -> bool:
        """Whether a weight of this shape can be pruned so; others stay as they are."""
        return True

    def refuse(self, name: str, leaf: Described) -> None:        # noqa: B027  (most rules take any cut)
        """MeshError where the part of a weight that a rank has cannot be pruned by itself."""

    @abstractmethod
    def choose(self, layers: Sequence[Layer], share: float, add: Add) -> None:
        """Writes 0 into `kept` where a weight is pruned; `share` of them are. `add` sums a flat array of int64 over all ranks."""


def pruned_of(n: int, share: float) -> int:
    """How many of n are pruned: the nearest whole number."""
    return min(n, math.floor(share * n + 0.5))


def groups_of(layers: Sequence[Layer], scope: str) -> list[list[Layer]]:
    return [list(layers)] if scope == "global" else [[layer] for layer in layers]


class Magnitude(Rule):
    """The smallest weights of each layer, or (scope "global") of all layers, are pruned; of equal ones those that come first by
    (name, index)."""

    def __init__(self, scope: str = "layer"):
        self.scope = scope

    def choose(self, layers: Sequence[Layer], share: float, add: Add) -> None:
        groups = groups_of(layers, self.scope)
        k = [pruned_of(sum(layer.size for layer in group), share) for group in groups]
        bits = {id(part): magnitude_bits(part.values) for layer in layers for part in layer.parts}
        width = 8 * max((part.values.itemsize for layer in layers for part in layer.parts), default=4)
        width = int(smallest_width(width, add))
        found = smallest([[bits[id(part)] for layer in group for part in layer.parts if part.counts] for group in groups], k,
                         width, add)
        for g, group in enumerate(groups):
            for part in (part for layer in group for part in layer.parts):
                part.kept[...] = bits[id(part)] > found.threshold[g] if k[g] else 1
        split = [g for g in range(len(groups)) if k[g] and found.taken[g] < found.equal[g]]
        if not split:
            return
        ties = [list(tied(groups[g], found.threshold[g], bits)) for g in split]
        last = smallest([[at for part, _, at in held if part.counts] for held in ties], [int(found.taken[g]) for g in split], 44,
                        add)
        for g, held in enumerate(ties):
            for part, where, at in held:
                part.kept[where] = at > last.threshold[g]


def smallest_width(width: int, add: Add) -> int:
    """The bits of the weights of all ranks, of which some may have none: the digits of all of them are looked at."""
    wide = np.array([int(width > 32)], np.int64)
    add(wide)
    return 64 if wide[0] else 32


def tied(group: Sequence[Layer], threshold: Any, bits: dict[int, np.ndarray[Any, Any]]) -> Any:
    """(part, places in it, places in the group) of the weights whose size is the threshold."""
    start = 0
    for layer in group:
        for part in layer.parts:
            where = np.flatnonzero(bits[id(part)] == threshold)
            yield part, where, (start + part.indices()[where]).astype(np.uint64)
        start += layer.size


class NOfM(Rule):
    """Of each M weights that follow each other in a row, an output's, the N largest are kept (Mishra et al., 2021); of equal ones
    the later. A convolution's row is (inputs, height, width)."""

    def __init__(self, pattern: str):
        self.n, self.m = n_of_m(pattern)
        self.pattern = pattern
        self.why = f"rows do not divide into groups of {self.m}"

    def fits(self, shape: Shape) -> bool:
        return math.prod(shape[1:]) % self.m == 0

    def refuse(self, name: str, leaf: Described) -> None:
        rest = [math.prod(shape[1:]) for shape in (leaf.shape, leaf.global_shape)]
        if rest[0] != rest[1] and (rest[0] % self.m or (leaf.offset[1] * math.prod(leaf.global_shape[2:])) % self.m):
            raise MeshError(f'shrink.pattern = "{self.pattern}" keeps {self.n} of {self.m} weights that follow each other, and '
                            f'mesh.tp cuts the rows of "{name}" into parts of {rest[0]}; choose mesh.tp so that {self.m} divides '
                            f'them, or add "{name}" to shrink.skip')

    def choose(self, layers: Sequence[Layer], share: float, add: Add) -> None:
        for part in (part for layer in layers for part in layer.parts):
            if part.values.size % self.m or part.first % self.m:
                raise MeshError(f'shrink.pattern = "{self.pattern}": a rank has elements {part.first} to '
                                f'{part.first + part.values.size} of "{part.leaf.name}", which cut a group')
            order = np.argsort(magnitude_bits(part.values).reshape(-1, self.m), axis=1, kind="stable")
            np.put_along_axis(part.kept.reshape(-1, self.m), order[:, :self.m - self.n], np.uint8(0), axis=1)


class Block(Rule):
    """Blocks of R x C weights (rows are outputs) are pruned whole, those with the smallest sum of sizes first; of equal ones
    those that come first.

    Sums are of whole numbers, of units of 2^-32, so that no cut of a block over ranks changes a bit.
    """

    def __init__(self, pattern: str, scope: str = "layer"):
        self.rows, self.columns = rows_by_columns(pattern)
        self.scope = scope
        self.why = f"a side is not a multiple of {pattern}"

    def fits(self, shape: Shape) -> bool:
        return shape[0] % self.rows == 0 and math.prod(shape[1:]) % self.columns == 0

    def choose(self, layers: Sequence[Layer], share: float, add: Add) -> None:
        ends = np.cumsum([0, *(layer.size // (self.rows * self.columns) for layer in layers)])
        sums = np.zeros(int(ends[-1]), np.int64)
        for layer, start in zip(layers, ends):
            for part in layer.parts:
                if part.counts:
                    sizes = np.minimum(np.nan_to_num(np.abs(part.values.astype(np.float64)), nan=LARGEST), LARGEST) * ONE
                    for view, blocks in self._blocks(layer, part, sizes.astype(np.int64)):
                        np.add.at(sums, start + blocks, view)
        add(sums)
        kept = np.ones(sums.size, np.uint8)
        for group in [(0, len(layers))] if self.scope == "global" else [(i, i + 1) for i in range(len(layers))]:
            first, stop = int(ends[group[0]]), int(ends[group[1]])
            order = np.argsort(sums[first:stop], kind="stable")
            kept[first + order[:pruned_of(stop - first, share)]] = 0
        for layer, start in zip(layers, ends):
            for part in layer.parts:
                for view, blocks in self._blocks(layer, part, part.kept):
                    view[...] = kept[start + blocks]

    def _blocks(self, layer: Layer, part: Part, array: np.ndarray[Any, Any]) -> Any:
        """(view, the number of each element's block in the layer) of the pieces of an array that lies as a part does."""
        across = math.prod(layer.shape[1:]) // self.columns
        for view, begin in part.leaf.pieces(array, part.first):
            row, *rest = np.ogrid[tuple(slice(a, a + n) for a, n in zip(begin, view.shape))]
            column = sum(place * math.prod(layer.shape[d + 2:]) for d, place in enumerate(rest))
            yield view, row // self.rows * across + column // self.columns


def n_of_m(pattern: str) -> tuple[int, int]:
    """The numbers of "2:4". ConfigError unless N weights of M can be kept, and M divides where slices are cut."""
    found = re.fullmatch(r"(\d{1,4}):(\d{1,4})", pattern)
    n, m = (int(word) for word in found.groups()) if found else (0, 0)
    if not 0 < n < m or m & (m - 1):
        raise ConfigError('shrink.pattern of "n:m" is N:M, such as "2:4": N of each M weights are kept, 0 < N < M, and M is a '
                          f'power of two; found "{pattern}"')
    return n, m


def rows_by_columns(pattern: str) -> tuple[int, int]:
    """The numbers of "16x1". ConfigError unless it is a block of 2 to 1,024 weights."""
    found = re.fullmatch(r"(\d{1,4})x(\d{1,4})", pattern)
    rows, columns = (int(word) for word in found.groups()) if found else (0, 0)
    if not 1 < rows * columns <= MOST:
        raise ConfigError('shrink.pattern of "block" is ROWSxCOLUMNS, such as "16x1", of '
                          f'2 to {MOST:,} weights; found "{pattern}"')
    return rows, columns
