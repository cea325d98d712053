"""Optimizer state, gradients and parameters cut over data-parallel ranks (ZeRO; Rajbhandari, Rasley, Ruwase, He, 2020).

    the flat layout, in buckets      [ 0 | 1 ][  0  |  1  ][ 0 | 1 ]      each bucket is cut into a slice for each rank
    what rank 1 keeps, its shard     [ 1 ][  1  ][ 1 ]                    its slices, one behind the other

For each element of n ranks' model, a rank keeps 1/n of what is cut and all of what is not. With Adam and float32, in bytes:

    comm.sharding    parameters   gradients   optimizer
    "optimizer"      4            4           8/n
    "gradients"      4            4/n         8/n
    "parameters"     4/n          4/n         8/n
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from mpitrain.backend import Array
from mpitrain.errors import GraphError
from mpitrain.nn import FlatLayout, Segment
from mpitrain.placement.buckets import Bucket, plan_buckets
from mpitrain.placement.slices import Part, cut_slices, parts_of
from mpitrain.schedules.direct import OwnersToAll, SumToOwners


class Strips:
    """A segmented view of flat memory: `strips[a:b]`, which must lie in one of its `parts`, shows its elements."""

    def __init__(self, flat: Array, parts: Sequence[slice], dtype: Any):
        self.flat, self._parts, self.dtype = flat, [part for part in parts if part.stop > part.start], dtype
        self._starts = list(accumulate((part.stop - part.start for part in self._parts), initial=0))
        self.size = self._starts[-1]
        self.shape = (self.size,)

    def __getitem__(self, part: slice) -> Array:
        i = bisect_right(self._starts, part.start) - 1
        assert part.start <= part.stop <= self._starts[i + 1], "elements of two strips"
        start = self.place(part.start)
        found: Array = self.flat[start:start + part.stop - part.start]
        return found

    def place(self, start: int) -> int:
        """Where element `start` lies in `flat`."""
        i = bisect_right(self._starts, start) - 1
        found: int = self._parts[i].start + start - self._starts[i]
        return found


class Unit:
    """The slices of one bucket, and this rank's among them, which lies at element `at` of the shard."""

    def __init__(self, bucket: Bucket, slices: Sequence[slice], rank: int, segments: Sequence[Segment], at: int):
        self.start, self.stop, self.segments = bucket.start, bucket.stop, bucket.segments
        self.own, self.at, self.name = slices[rank], at, bucket.name
        bounds = tuple(s.start - bucket.start for s in slices) + (bucket.stop - bucket.start,)
        self.sum_to_owners, self.owners_to_all = SumToOwners(bounds), OwnersToAll(bounds)
        self.within = slice(self.own.start - bucket.start, self.own.stop - bucket.start)    # This rank's elements of the bucket.
        self.shard = slice(at, at + self.own.stop - self.own.start)                       # The same elements in the shard.
        by = at - self.own.start
        self.parts = [replace(p, start=p.start + by, stop=p.stop + by) for p in parts_of(segments, self.own)]


class Shards:
    """The elements that each of `n` ranks keeps; those of rank `rank` are the storage of an optimizer.

    `cuts` are numbers of parameters, in the layout's order, that no bucket joins. `whole`: slices of whole parameters, for an
    optimizer that needs their norms. A bucket that begins with one of `alike` (keys of parameters) is cut equally; of the others,
    ranks that have less so far get more. `values` is to be set before an optimizer is made.
    """

    allocate = compute = None

    def __init__(self, layout: FlatLayout, rank: int, n: int, *, bucket_bytes: int, cuts: Sequence[int], whole: bool,
                 alike: Collection[str] = ()):
        self.layout, self.rank, self.n, self.cuts = layout, rank, n, list(cuts)
        self.dtype, self.device = layout.dtype, layout.device
        self.units: list[Unit] = []
        self.size = 0
        held = [0] * n
        for bucket in plan_buckets(layout.segments, layout.size, max(1, bucket_bytes // layout.dtype.itemsize), cuts):
            lengths = None if bucket.segments[0].parameter.key in alike else level(held, bucket.stop - bucket.start)
            slices = cut_slices(bucket.segments, bucket.start, bucket.stop, n, whole=whole, lengths=lengths)
            held = [had + s.stop - s.start for had, s in zip(held, slices)]
            unit = Unit(bucket, slices, rank, bucket.segments, self.size)
            self.units.append(unit)
            self.size = unit.shard.stop
        self.segments: list[Part] = [part for unit in self.units for part in unit.parts]
        self.values: Any = None

    def strips(self, flat: Array) -> Strips:
        """This rank's slices of a flat array of the whole layout, as one."""
        return Strips(flat, [unit.own for unit in self.units], self.dtype)

    def initialise(self, seed: int) -> Array:
        """The initial values of this rank's slices, as an array; those of the others are made nowhere here."""
        flat = self.new_flat()
        for part in self.segments:
            part.parameter.fill(seed, flat[part.start:part.stop], part.first, self.device.xp)
        return flat

    def memory(self, size: int, allocate: Callable[[int], Any] | None = None) -> Array:
        """An array of so many elements, of this storage's kind; its content is undefined."""
        return self.layout.memory(size, allocate)

    def new_flat(self, allocate: Callable[[int], Any] | None = None) -> Array:
        """An array of the shard's elements, zero."""
        flat = self.layout.memory(self.size, allocate)
        flat.fill(0)
        return flat

    def refresh(self, segments: Sequence[Any] | None = None) -> None:
        """Nothing: the copies in 16 bits are of whole parameters, and made when the slices of other ranks are there."""

    def attach_gradients(self) -> Array:
        raise GraphError("Optimizer.step is for a rank that has all gradients of its model; a trainer updates sharded ones")

    def views(self, flat: Array) -> list[Array]:
        """Each part of a parameter, flat."""
        return [flat[part.start:part.stop] for part in self.segments]


def level(held: Sequence[int], more: int) -> list[float]:
    """Each rank's share of `more` elements, so that all hold equally many where that is possible (water filling)."""
    low, high = float(min(held)), float(max(held) + more)
    for _ in range(64):                                       # The level of the water, by bisection.
        middle = (low + high) / 2
        low, high = (middle, high) if sum(max(0.0, middle - had) for had in held) < more else (low, middle)
    return [max(0.0, high - had) for had in held]


def finer(chunks: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Numbers of parameters, cut at the ends of `chunks` and after each of `ends` parameters as well."""
    bounds = sorted({0, *accumulate(chunks), *ends})
    return [b - a for a, b in pairwise(bounds)]
