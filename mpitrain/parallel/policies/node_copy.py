"""One copy of the parameters on each node, whose slices all ranks of all nodes update."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.comm.work import Collective, Work
from mpitrain.parallel.policies.node_memory import block_of_the_node, shared_by_all
from mpitrain.placement.shards import Unit
from mpitrain.schedules.direct import OwnersToAll


def barrier(shared: SharedChannel) -> Collective:
    """A barrier of all ranks of all nodes, after which each sees what the others have written."""
    return shared.prepare(shared.allocate(8).view(np.float64), "parameters")


class NodeCopy:
    """The nodes' copies of the parameters.

        bucket    [ 0 on A | 0 on B | 1 on A | 1 on B ]          the slices of ranks 0 and 1 of nodes A and B
                  [     piece 0     |     piece 1     ]

    The ranks of a node sum its gradients by pieces. Same-numbered ranks of the nodes add these up, and exchange the new values,
    each for its own node's copy.
    """

    def __init__(self, shared: SharedChannel):
        self.shared, self.barrier = shared, barrier(shared)
        self.n_nodes = shared.size // shared.node.size
        self._first = shared.node.rank * self.n_nodes         # The first slice of this rank's piece.
        self.number = self._first + (shared.cross.rank if shared.cross is not None else 0)      # This rank's own slice.

    def allocate(self, nbytes: int) -> Any:
        return block_of_the_node(self.shared, nbytes, "parameters")

    def allocate_sums(self, nbytes: int) -> Any:
        return shared_by_all(self.shared, nbytes, "gradients")

    def piece(self, unit: Unit) -> tuple[int, int]:
        """The ends of this rank's piece, in elements of the bucket."""
        bounds = self.bounds(unit)
        return bounds[0], bounds[-1]

    def start_gather(self, values: Array, unit: Unit) -> Work | None:
        """Begins to bring the new values of the piece from the other nodes, if there are any, into the copy `values`."""
        if self.shared.cross is None:
            return None
        bounds = self.bounds(unit)
        piece = values[unit.start + bounds[0]:unit.start + bounds[-1]]
        slices = OwnersToAll((0, *(stop - bounds[0] for _, stop in pairwise(bounds))))
        return self.shared.cross.start_all_gather(piece, slices, unit.name)

    def bounds(self, unit: Unit) -> tuple[int, ...]:
        """The ends of the slices of the piece, in elements of the bucket."""
        return unit.owners_to_all.bounds[self._first:self._first + self.n_nodes + 1]
