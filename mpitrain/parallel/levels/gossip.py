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

from mpitrain.comm.messages.signature import HEADER_BYTES
from mpitrain.schedules.graph_check import Proved
from mpitrain.schedules.graphs import arrivals, exchange, kept

if TYPE_CHECKING:
    from mpitrain.comm.messages.channel import Channel
    from mpitrain.comm.work import Collective, Work


class Gossip:
    """One worker's rounds over a graph that was proved, on the workers of `channel`, with `elements` parameters of `dtype`.

    Fill `outgoing`, `start()`, and take what `finish()` returns: the average with the neighbours. Workers call both alike.
    `round` counts the rounds done, and `weight` is the scalar of push-sum: a run that goes on has to know both.
    """

    def __init__(self, channel: Channel, graph: Proved, elements: int, dtype: Any):
        assert graph.n == channel.size, f"a graph of {graph.n} workers on {channel.size}"
        self.channel, self.graph, self.elements = channel, graph, elements
        self.round, self.weight = 0, 1.0
        dtype = np.dtype(str(dtype))
        self._tail = graph.tail // dtype.itemsize             # The scalar, a float64 behind the parameters.
        self._parts = np.zeros((1 + graph.slots, elements + self._tail), dtype)
        self._rounds: list[Collective] = []
        self._work: Work | None = None
        if channel.size > 1 and elements:
            self._rounds = [channel.prepare_steps(self._parts.reshape(-1), f"gossip round {index}", exchange(edges, graph.slots))
                            for index, edges in enumerate(graph.rounds)]

    @property
    def outgoing(self) -> np.ndarray[Any, Any]:
        """(elements,): what this worker sends, on the host. It is scratch once a round has ended."""
        own: np.ndarray[Any, Any] = self._parts[0, :self.elements]
        return own

    @property
    def nbytes(self) -> int:
        """The bytes of what is sent and of what arrives."""
        return int(self._parts.nbytes)

    def start(self) -> int:
        """Sends `outgoing` to this round's neighbours; how many bytes that takes."""
        if not self._rounds:
            return 0
        if self._tail:
            self._parts[0, self.elements:] = np.array([self.weight]).view(self._parts.dtype)
        self._work = self._rounds[self.round % len(self.graph.rounds)].start()
        sent = sum(edge.source == self.channel.rank for edge in self.graph.edges(self.round))
        return HEADER_BYTES + sent * int(self._parts[0].nbytes)

    def finish(self) -> np.ndarray[Any, Any]:
        """Waits for the neighbours; the average with what they sent, valid until the next `start`."""
        rank, edges = self.channel.rank, self.graph.edges(self.round)
        self.round += 1
        if self._work is None:
            return self.outgoing
        self._work.wait()
        self._work = None
        shares = sorted([(rank, 0, float(kept(edges, rank)) * self.weight),
                         *((edge.source, k, float(edge.weight) * self._weight_of(k))
                           for k, edge in enumerate(arrivals(edges, rank), 1))])
        if self._tail:
            self.weight = sum(share for *_, share in shares)
            shares = [(worker, part, share / self.weight) for worker, part, share in shares]
        return average(self._parts[:, :self.elements], [(part, share) for _, part, share in shares])

    def _weight_of(self, part: int) -> float:
        return float(np.array(self._parts[part, self.elements:]).view(np.float64)[0]) if self._tail else 1.0


def average(parts: np.ndarray[Any, Any], shares: Sequence[tuple[int, float]]) -> np.ndarray[Any, Any]:
    """The sum of rows of `parts` times their `shares`, (row, share) in the order in which they are added up. It takes the place
    of the first one, and the others become scratch."""
    (first, share), *others = shares
    total = parts[first]
    total *= total.dtype.type(share)
    for part, share in others:
        parts[part] *= parts.dtype.type(share)
        total += parts[part]
    found: np.ndarray[Any, Any] = total
    return found
