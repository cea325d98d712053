"""Reuse of flat arrays, since a fresh page costs more than the arithmetic done on it."""

from __future__ import annotations

from sys import getrefcount

import numpy as np

from mpitrain.backend import Array
from mpitrain.nn import FlatLayout

ALONE = 2                                    # getrefcount of memory with a single view


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
