"""Sums of running statistics (batch norm) over all micro-batches of a step: once a step, by one rule for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from mpitrain.backend import asnumpy
from mpitrain.comm.face import AnyChannel
from mpitrain.nn import Module, apply_statistics, collect_statistics, defer_statistics, running_layers
from mpitrain.nn.statistics import Running, Together, move_statistics
from mpitrain.parallel.gradients.bucket_sum import prepare_tree
from mpitrain.schedules.microtree import Counter, RankTree

Host: TypeAlias = np.ndarray[Any, Any]


class Statistics:
    """The running statistics of the layers of a stage's `chunks`. `channel` has the ranks whose sums are added.

    Without a `tree`, each rank adds up its own micro-batches as they come, then the sums of the ranks are added. With one, it is
    the tree over the micro-batches of all ranks, as for gradients; a micro-batch without rows counts as zeros. The chunks take
    turns, and each takes the micro-batches in order. On a device the sums stay there (`nn.statistics.Together`); those of
    several ranks are added on the host, once a step, when the exchange of gradients is over.
    """

    def __init__(self, chunks: Sequence[Module], channel: AnyChannel, tree: RankTree | None):
        self.channel, self.tree = channel, tree
        self.layers = [layer for chunk in chunks for layer in running_layers(chunk)]
        defer_statistics(self.layers)
        self.there = Together(self.layers) if tree is None and Together.possible(self.layers) else None
        self._chunks = [] if tree is None else [_Sums(running_layers(chunk), tree) for chunk in chunks]

    def after_forward(self, index: int, chunk: int = 0) -> None:
        """To be called after each forward of a micro-batch through a chunk."""
        if self._chunks:
            self._chunks[chunk].collect(index)

    def total(self) -> Host:
        """float64, as `collect_statistics` has it, over all ranks; empty where no layer keeps any."""
        if self.tree is None:
            if self.there is None:
                statistics = collect_statistics(self.layers)
            else:
                statistics = asnumpy(self.there.sums)
                self.there.sums[...] = 0
            if statistics.size:
                self.channel.allreduce(statistics, name="batch statistics")
            return statistics
        everything = [chunk.take() for chunk in self._chunks if chunk.size]
        if not everything:
            return np.zeros(0)
        sums = [np.concatenate(node) for node in zip(*everything, strict=True)]
        collective = prepare_tree(self.channel, self.tree, sums, "batch statistics")
        if collective is not None:
            collective.run()
        return sums[0]

    def apply(self) -> None:
        """Moves running statistics towards the mean over all micro-batches of all ranks, once a step. It communicates."""
        if self.there is not None:
            if self.channel.size > 1:
                self.there.sums.set(self.total())
            self.there.move()
            return
        if self.tree is None and self.channel.size == 1:
            move_statistics(self.layers)
            return
        total = self.total()
        if total.size:
            apply_statistics(self.layers, total)


class _Sums:
    """The statistics of one chunk's layers: a sum for each node of the tree that is complete here."""

    def __init__(self, layers: Sequence[Running], tree: RankTree):
        self.layers, self.tree = layers, tree
        self.size = collect_statistics(layers).size
        self._counter, self._sums = Counter(tree.joins), list[Host]()
        self._next = tree.first

    def collect(self, index: int) -> None:
        """The layers have seen micro-batch `index`, and nothing else since the last call."""
        if self.size:
            self._zeros(until=index)
            self._add(collect_statistics(self.layers))

    def take(self) -> list[Host]:
        """The sums of the step, which is over."""
        self._zeros(until=self.tree.stop)
        sums, self._sums = self._sums, []
        self._counter, self._next = Counter(self.tree.joins), self.tree.first
        return sums

    def _zeros(self, until: int) -> None:
        while self._next < until:
            self._add(np.zeros(self.size))

    def _add(self, values: Host) -> None:
        self._sums.append(values)
        self._counter.push(self._next, self._fold)
        self._next += 1

    def _fold(self, lower: int) -> None:
        above = self._sums.pop()
        self._sums[lower] = self._sums[lower] + above
