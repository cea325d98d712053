"""Sums of running statistics (batch norm) over all micro-batches of a step: once a step, by one rule for all layers."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np

from mpitrain.comm.channel import Channel
from mpitrain.nn import Module, collect_statistics, running_layers
from mpitrain.parallel.tree import Channel as TreeChannel
from mpitrain.parallel.tree import RankTree
from mpitrain.schedules.microtree import Node

Host: TypeAlias = np.ndarray[Any, Any]


class Statistics(Protocol):
    """`after_forward` is called after each micro-batch's forward, `total` once a step; the latter communicates."""

    def after_forward(self, index: int) -> None: ...
    def total(self) -> Host: ...


class PlainStatistics:
    """Each rank adds up its own micro-batches as they come, then the ranks' sums are added."""

    def __init__(self, model: Module, channel: Channel):
        self.layers, self.channel = running_layers(model), channel

    def after_forward(self, index: int) -> None:
        """The layers keep the sum themselves."""

    def total(self) -> Host:
        """float64, as `collect_statistics` has it, over all ranks; empty where no layer keeps any."""
        statistics = collect_statistics(self.layers)
        if statistics.size and self.channel.size > 1:
            self.channel.allreduce(statistics, name="batch statistics")
        return statistics


class TreeStatistics:
    """The tree over the micro-batches of all ranks, as for gradients; a micro-batch without rows counts as zeros."""

    def __init__(self, model: Module, channel: TreeChannel, tree: RankTree):
        self.layers, self.channel, self.tree = running_layers(model), channel, tree
        self._sums: list[tuple[Node, Host]] = []
        self._next = tree.first
        self._size = collect_statistics(self.layers).size

    def after_forward(self, index: int) -> None:
        if self._size:
            self._zeros(until=index)
            self._add(collect_statistics(self.layers))

    def total(self) -> Host:
        """float64, as `collect_statistics` has it, over all ranks; empty where no layer keeps any."""
        if not self._size:
            return np.zeros(0)
        self._zeros(until=self.tree.stop)
        sums = [values for _, values in self._sums]
        self._sums, self._next = [], self.tree.first
        work = self.tree.start(self.channel, sums, "batch statistics")
        if work is not None:
            work.wait()
        return sums[0]

    def _zeros(self, until: int) -> None:
        while self._next < until:
            self._add(np.zeros(self._size))

    def _add(self, values: Host) -> None:
        node = self._next, self._next + 1
        self._next += 1
        while self._sums and self.tree.joins(self._sums[-1][0], node):
            before, below = self._sums.pop()
            node, values = (before[0], node[1]), below + values
        self._sums.append((node, values))
