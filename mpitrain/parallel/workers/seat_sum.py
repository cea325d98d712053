"""The sum of flat arrays of a round's workers, beside their deltas: along the tree over the seats, as for those."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.comm.face import AnyChannel
from mpitrain.parallel.gradients.bucket_sum import prepare_tree
from mpitrain.schedules.microtree import Counter, RankTree


class SeatSum:
    """Arrays of `length`, added seat by seat in order; the bits of the sum depend on no number of ranks."""

    def __init__(self, channel: AnyChannel, tree: RankTree, length: int, dtype: Any, name: str):
        self.channel, self.tree, self.length, self.dtype, self.name = channel, tree, length, dtype, name
        self._counter, self._sums, self._next = Counter(tree.joins), list[Array](), tree.first

    def add(self, seat: int, values: Array) -> None:
        """Adds the array of a worker on a seat of this rank; seats come in order, and `values` may be written to."""
        if seat == self._next - 1:
            self._sums[-1] += values                          # Another worker on the same seat, whose sum has not been joined.
            return
        self._settle(until=seat)
        self._sums.append(values)
        self._next = seat + 1

    def take(self) -> Array:
        """The sum over all workers of all ranks, after the last one here. It communicates."""
        self._settle(until=self.tree.stop)
        collective = prepare_tree(self.channel, self.tree, self._sums, self.name)
        if collective is not None:
            collective.run()
        total = self._sums[0]
        self._counter, self._sums, self._next = Counter(self.tree.joins), [], self.tree.first
        return total

    def _settle(self, until: int) -> None:
        """The seats before `until` are complete; those that nobody has taken count as zeros."""
        if len(self._sums) > len(self._counter.nodes):
            self._counter.push(self._next - 1, self._fold)
        while self._next < until:
            self._sums.append(np.zeros(self.length, self.dtype))
            self._counter.push(self._next, self._fold)
            self._next += 1

    def _fold(self, lower: int) -> None:
        above = self._sums.pop()
        self._sums[lower] += above
