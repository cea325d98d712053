"""Buckets: the parts of the flat gradient that travel together.

    flat storage (registration order)   | embed | block 0 | block 1 | ... | head |
    backward finishes them in reverse                          <----------------
    buckets, in the order they start    |  3  |     2     |     1     |     0    |

A gradient arena has the layout of the flat parameters, so a bucket is one contiguous slice of both: it is sent from where
backward wrote it, and the optimizer reads it where it landed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

from mpitrain.backend import Array
from mpitrain.nn import Segment
from mpitrain.schedules.microtree import Counter


@dataclass
class Turn:
    """How far the micro-batches of one chunk of the model have come in this step."""

    first: int = 0                                     # The first micro-batch of this rank.
    buckets: list[Bucket] = field(default_factory=list)
    leaf: int = -1                                     # The micro-batch whose backward runs now (-1: none).
    next: int = 0                                      # The first micro-batch that has not begun.
    last: bool = False                                 # Whether `leaf` is the last one of this step.
    arena: int = 0                                     # The arena of its gradients.

    def begin_step(self) -> None:
        self.leaf, self.next, self.last = -1, self.first, False


@dataclass
class Bucket:
    """Elements start:stop of an arena; `waiting` parameters of it have no final gradient yet in this backward.

    `name` is what error messages call it: its number and the parameters it holds.
    """

    index: int
    start: int
    stop: int
    segments: list[Segment]
    waiting: int = 0
    sums: Counter = field(default_factory=Counter)     # The sums of micro-batches, as counted.
    turn: Turn = field(default_factory=Turn)           # The turn of the chunk that has its parameters.
    apart: Any = None                                  # The channel of its sums, where not the reducer's.
    collective: Any = None                             # Its sum over ranks, prepared at the first start.
    parts: list[Array] = field(default_factory=list)   # This part of each arena: the same objects in every step.
    name: str = field(init=False)

    def __post_init__(self) -> None:
        first, last = self.segments[0].name, self.segments[-1].name
        self.name = f"gradient bucket {self.index} ({first}" + (f" .. {last})" if first != last else ")")

    @property
    def trained(self) -> bool:
        """Whether any of its parameters is: else ranks have nothing to add up."""
        return any(s.parameter.requires_grad for s in self.segments)

    @property
    def trained_ever(self) -> bool:
        """Whether any of its parameters is, now or from a later step on."""
        return self.trained or any(0 < s.parameter.trained_from < math.inf for s in self.segments)

    def part(self, arenas: Sequence[Array], index: int) -> Array:
        """The bucket's part of arena `index`."""
        while len(self.parts) <= index:
            self.parts.append(arenas[len(self.parts)][self.start:self.stop])
        return self.parts[index]


def plan_buckets(segments: Sequence[Segment], total: int, bucket_elements: int,
                 chunks: Sequence[int] | None = None) -> list[Bucket]:
    """Cuts 0:total into buckets of about `bucket_elements`, at parameter bounds, last parameters first.

    A parameter larger than a bucket gets a bucket of its own. Every element, padding included, is in exactly one bucket.
    `chunks` are numbers of parameters, in order: no bucket crosses the end of a chunk.
    """
    ends = set(accumulate(reversed(chunks or [len(segments)])))
    bounds: list[int] = []
    stop = total
    for count, segment in enumerate(reversed(segments), 1):
        if stop - segment.start >= bucket_elements or count in ends:
            bounds.append(count)
            stop = segment.start
    return cut_buckets(segments, total, bounds)


def runs(kinds: Sequence[object]) -> list[int]:
    """The lengths of runs of neighbours of one kind."""
    return [len(list(same)) for _, same in groupby(kinds, key=id)]


def frozen_alike(segments: Sequence[Any]) -> list[int]:
    """The lengths of runs of neighbours that are trained from the same step on: others share no bucket with them."""
    return [len(list(same)) for _, same in groupby(s.parameter.trained_from for s in segments)]


def cut_buckets(segments: Sequence[Segment], total: int, bounds: Sequence[int]) -> list[Bucket]:
    """The buckets that `bounds` gives: bucket k ends after `bounds[k]` parameters, counted from the last parameter."""
    assert list(bounds) == sorted(set(bounds)) and (not bounds or bounds[-1] == len(segments)), f"not bounds of buckets: {bounds}"
    backwards = segments[::-1]
    buckets: list[Bucket] = []
    stop, first = total, 0
    for k, last in enumerate(bounds):
        start = 0 if last == len(segments) else backwards[last - 1].start      # 0 includes padding before the first parameter.
        buckets.append(Bucket(k, start, stop, list(backwards[first:last][::-1])))
        stop, first = start, last
    return buckets
