"""Sums of running statistics (batch norm) over all micro-batches of a step: once a step, by one rule for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from mpitrain.comm.face import AnyChannel
from mpitrain.comm.messages.channel import Channel
from mpitrain.nn import Module, collect_statistics, running_layers
from mpitrain.nn.statistics import Running
from mpitrain.parallel.gradients.bucket_sum import prepare_tree
from mpitrain.placement.tree import RankTree
from mpitrain.schedules.microtree import Counter

Host: TypeAlias = np.ndarray[Any, Any]


class Statistics(Protocol):
    """`after_forward` is called after each forward of a micro-batch through a chunk, `total` once a step; it communicates."""

    def after_forward(self, index: int, chunk: int = 0) -> None: ...
    def total(self) -> Host: ...


class PlainStatistics:
    """Each rank adds up its own micro-batches as they come, then the sums of the ranks are added."""

    def __init__(self, model: Module, channel: Channel):
        self.layers, self.channel = running_layers(model), channel

    def after_forward(self, index: int, chunk: int = 0) -> None:
        """The layers keep the sum themselves."""

    def total(self) -> Host:
        """float64, as `collect_statistics` has it, over all ranks; empty where no layer keeps any."""
        statistics = collect_statistics(self.layers)
        if statistics.size:
            self.channel.allreduce(statistics, name="batch statistics")
        return statistics


class TreeStatistics:
    """The tree over the micro-batches of all ranks, as for gradients; a micro-batch without rows counts as zeros.

    Where a stage runs several `chunks` of the model, each takes the micro-batches in order, and the chunks take turns.
    """

    def __init__(self, chunks: Module | Sequence[Module], channel: AnyChannel, tree: RankTree):
        self.channel, self.tree = channel, tree
        self._chunks = [_Sums(running_layers(chunk), tree) for chunk in ([chunks] if isinstance(chunks, Module) else chunks)]

    def after_forward(self, index: int, chunk: int = 0) -> None:
        self._chunks[chunk].collect(index)

    def total(self) -> Host:
        """float64, as `collect_statistics` has it, over all ranks; empty where no layer keeps any."""
        everything = [chunk.take() for chunk in self._chunks if chunk.size]
        if not everything:
            return np.zeros(0)
        sums = [np.concatenate(node) for node in zip(*everything, strict=True)]
        collective = prepare_tree(self.channel, self.tree, sums, "batch statistics")
        if collective is not None:
            collective.run()
        return sums[0]


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
