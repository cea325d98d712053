"""Memory for buckets on their way. Fresh pages cost more than the arithmetic done on them, so a rank's own memory is used again.
In memory that ranks share, each bucket has a place in a ring that a few of them fill.

    ring     [ bucket 0 | bucket 1 | bucket 2 | bucket 3 | bucket 4 | ]
             [  bucket 5    | bucket 6 | ...                                 sent when bucket 0 and 1 have been summed

Ranks sum what lies at the same place on all of them, so a bucket's place follows from its number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.nn import FlatLayout
from mpitrain.placement.buckets import Bucket

ALONE = 2                                    # getrefcount of memory with a single view


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


class BufferPool:
    """Lends arrays of a layout's dtype and device. An array comes back by itself when the last view of it is dropped.

    On a GPU, arrays come from CuPy's own pool.
    """

    def __init__(self, layout: FlatLayout):
        self.layout = layout
        self._kept: list[np.ndarray] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays in the pool."""
        return sum(array.nbytes for array in self._kept)

    def take(self, size: int) -> Array:
        """An array of `size` elements; its contents are whatever was there."""
        if self.layout.device.xp is not np or size == 0:
            return self.layout.memory(size)
        free = [i for i in range(len(self._kept)) if getrefcount(self._kept[i].base) == ALONE]
        fitting = [i for i in free if self._kept[i].size >= size]
        if fitting:
            return self._kept[min(fitting, key=lambda i: self._kept[i].size)][:size]
        if free:                                              # All are too small: a larger one takes the place of one.
            del self._kept[max(free, key=lambda i: self._kept[i].size)]
        array: np.ndarray = self.layout.memory(size)
        self._kept.append(array)
        return array[:size]
