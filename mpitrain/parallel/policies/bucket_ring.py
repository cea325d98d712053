"""Shared memory for buckets on their way: each bucket has a place in a ring that a few of them fill.

    ring     [ bucket 0 | bucket 1 | bucket 2 | bucket 3 | bucket 4 | ]
             [  bucket 5    | bucket 6 | ...                                 sent when bucket 0 and 1 have been summed

Ranks sum what lies at the same place on all of them, so a bucket's place follows from its number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.nn import FlatLayout
from mpitrain.placement.buckets import Bucket


class BucketRing:
    """`views[i]` is the memory of bucket i; `overlapping[i]` are the buckets whose memory overlaps it, itself included.

    The ring holds any `most` buckets that follow each other. `allocate` gives memory that ranks share.
    """

    def __init__(self, buckets: Sequence[Bucket], layout: FlatLayout, most: int, allocate: Callable[[int], Any]):
        lengths = [bucket.stop - bucket.start for bucket in buckets]
        size = ring_size(lengths, most)
        starts = ring(lengths, size)
        self.flat = layout.memory(size, allocate)
        self.views: list[Array] = [self.flat[start:start + length] for start, length in zip(starts, lengths)]
        low, high = np.array(starts, int), np.array(starts, int) + np.array(lengths, int)
        common = (low[:, None] < high) & (low < high[:, None])
        self.overlapping: list[set[int]] = [{i, *np.flatnonzero(row).tolist()} for i, row in enumerate(common)]


def ring_size(lengths: Sequence[int], most: int) -> int:
    """The size of a ring that holds any `most` consecutive buckets of these lengths."""
    return max((sum(lengths[i:i + most]) for i in range(len(lengths))), default=0)


def ring(lengths: Sequence[int], size: int) -> list[int]:
    """The start of each bucket: one behind the other, and at 0 again where the rest of `size` is too short."""
    starts, end = [], 0
    for length in lengths:
        start = end if end + length <= size else 0
        starts.append(start)
        end = start + length
    return starts
