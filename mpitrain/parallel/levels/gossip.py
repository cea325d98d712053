"""Rounds of gossip: workers average their parameters with a few others, instead of summing gradients over all.

    D-PSGD (Lian et al., 2017)                     x_i <- sum_j W[i, j] x_j - lr g_i(x_i)
    push-sum, SGP (Assran et al., 2019)            x_i <- sum_j W[i, j] x_j - lr g_i(z_i)
                                                   w_i <- sum_j W[i, j] w_j             z_i = x_i / w_i

A worker trains, and keeps, z. Under push-sum its scalar w travels behind the parameters, and z is averaged by the weights
W[i, j] w_j / w_i that follow from it: x never lies in memory. A worker sends what it has at the beginning of a step, so the
messages are under way while it computes its gradient at the same place, which changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.schedules.graph_check import Method, Proved
from mpitrain.schedules.graphs import arrivals, exchange, kept

if TYPE_CHECKING:
    from mpitrain.comm.messages.channel import Channel
    from mpitrain.comm.work import Collective, Work

SAMPLE = 4096                  # Parameters that `drift` looks at: of 61,706 in LeNet, their drift is within 3 % of that of all.


class Gossip:
    """One worker's rounds over a graph that was proved, on the workers of `channel`, with `elements` parameters of `dtype`.

    `start(values)`, then, when the gradient is there, `finish(values)`: averaged in place. Workers call both alike. `weight` is
    the scalar of push-sum, and `round` the rounds done: both belong into a checkpoint.
    """

    def __init__(self, channel: Channel, graph: Proved, elements: int, dtype: Any, method: Method = "d-psgd"):
        assert graph.n == channel.size, f"a graph of {graph.n} workers on {channel.size}"
        self.channel, self.graph, self.elements, self.method = channel, graph, elements, method
        self.round, self.weight = 0, 1.0
        dtype = np.dtype(str(dtype))
        self._tail = 8 // dtype.itemsize if method == "push-sum" else 0       # The scalar, a float64 behind the parameters.
        self._parts = np.zeros((1 + graph.slots, elements + self._tail), dtype)
        self._rounds: dict[int, Collective] = {}
        self._work: Work | None = None
        for index, edges in enumerate(graph.rounds if channel.size > 1 else ()):
            self._rounds[index] = channel.prepare_steps(self._parts.reshape(-1), f"gossip round {index}",
                                                        exchange(edges, graph.slots))

    @property
    def nbytes(self) -> int:
        """The bytes of what is sent and of what arrives."""
        return int(self._parts.nbytes)

    @property
    def sent_bytes(self) -> int:
        """The bytes that this worker sends in the round that comes next."""
        return int(self._parts[0].nbytes) * sum(edge.source == self.channel.rank for edge in self.graph.edges(self.round))

    def start(self, values: Array) -> None:
        """Sends `values` (flat) to this round's neighbours; they may change as soon as this returns."""
        if self.channel.size == 1:
            return
        self._parts[0, :self.elements] = asnumpy(values)
        if self._tail:
            self._parts[0, self.elements:] = np.array([self.weight]).view(self._parts.dtype)
        self._work = self._rounds[self.round % len(self.graph.rounds)].start()

    def finish(self, values: Array) -> None:
        """Waits for the neighbours, and replaces `values` by the average with theirs."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._average(values)
        self.round += 1

    def _average(self, values: Array) -> None:
        """Adds by the numbers of the workers, so that equal neighbourhoods have equal bits."""
        rank, edges = self.channel.rank, self.graph.edges(self.round)
        shares = sorted([(rank, 0, float(kept(edges, rank)) * self.weight),
                         *((edge.source, k, float(edge.weight) * self._weight_of(k))
                           for k, edge in enumerate(arrivals(edges, rank), 1))])
        total = sum(share for *_, share in shares)
        if self._tail:
            self.weight = total
        average(self._parts[:, :self.elements], [(part, share / total if self._tail else share) for _, part, share in shares])
        values[...] = array_module(values).asarray(self._parts[shares[0][1], :self.elements])

    def _weight_of(self, part: int) -> float:
        return float(np.array(self._parts[part, self.elements:]).view(np.float64)[0]) if self._tail else 1.0

    def mean(self, values: Array) -> None:
        """Replaces `values` by the mean over all workers, the same bits on each. It communicates."""
        n = self.channel.size
        if n > 1:
            values *= values.dtype.type(self.weight / n)
            self.channel.allreduce(values, name="mean of the workers")

    def drift(self, values: Array) -> float:
        """The root mean square of the workers' distances from their mean over that of the mean, by a sample of the parameters;
        equal on all workers. It communicates."""
        sample = asnumpy(values[::max(1, -(-self.elements // SAMPLE))]).astype(np.float64)
        sums = np.concatenate([sample, [sample @ sample]])
        self.channel.allreduce(sums, name="drift")
        mean, n = sums[:-1] / self.channel.size, self.channel.size
        length = float(mean @ mean)
        return float(np.sqrt(max(sums[-1] / n - length, 0.0) / length)) if length else 0.0


def average(parts: np.ndarray[Any, Any], shares: Sequence[tuple[int, float]]) -> None:
    """The sum of rows of `parts` times their shares, into the first of them; the others become scratch."""
    (first, share), *others = shares
    total = parts[first]
    total *= total.dtype.type(share)
    for part, share in others:
        parts[part] *= parts.dtype.type(share)
        total += parts[part]
