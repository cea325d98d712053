"""A rank's nodes of the one tree over the micro-batches of all ranks, which `gradients.bucket_sum` completes.

    micro-batches   0   1   2   3   4   5
    rank            0   0   0   1   1   1       rank 0 holds the sum [0,2) and 2 by itself, rank 1 holds 3 and [4,6)
    tree           ((0 + 1)+(2 + 3))+(4 + 5)    what the exchange does with these four sums
"""

from __future__ import annotations

from functools import partial

from mpitrain.schedules.microtree import joins, micro_tree, nodes_of, share, width


class RankTree:
    """The `nodes` of rank `rank` of `n` in the tree over `n_micro` micro-batches, of which first:stop are its own."""

    def __init__(self, n_micro: int, rank: int, n: int):
        self.n_micro, self.n = n_micro, n
        self.first, self.stop = share(rank, n, n_micro)
        self.nodes = nodes_of(n_micro, n)[rank]
        self.width = width(n_micro, n)
        self.joins = partial(joins, n_micro=n_micro)           # Whether two neighbouring sums are to be added now.
        self.steps = partial(micro_tree, n_micro=n_micro)      # One object, since channels keep plans by it.
