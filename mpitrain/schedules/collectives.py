"""The collective algorithms by name, one registry for each operation; n ranks, arrays of `length` elements.

    operation        before                            after
    all-reduce       each rank: a contribution         each rank: the sum, the same bits everywhere
    reduce-scatter   each rank: a contribution         rank i: part i of the sum (the rest of its data is scratch)
    all-gather       rank i: part i                    each rank: all parts
    broadcast        the root: the data                each rank: the data
    all-to-all       rank r: part i is meant for i     rank r: part i is what i meant for r

Part i of n is `part(i, n, length)`. All of them are short generators of plain-data rounds, one rank's view each, in place.
Every all-reduce here gives the same bits on every rank: either one rank computes a part and the others receive it, or both
partners add the same two values in the same order, the lower rank's on the left.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from mpitrain.registry import Registry
from mpitrain.schedules.direct import direct, direct_all_gather, direct_reduce_scatter, tree
from mpitrain.schedules.exchange import binomial_broadcast, direct_all_to_all
from mpitrain.schedules.halving import halving_doubling, recursive_doubling
from mpitrain.schedules.hierarchical import hierarchical
from mpitrain.schedules.ring import ring, ring_all_gather, ring_reduce_scatter, segmented_ring
from mpitrain.schedules.steps import Algorithm, Rooted, part

__all__ = ["ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "BROADCAST", "ON_NODES", "REDUCE_SCATTER", "SMALL_BYTES",
           "binomial_broadcast", "choose", "part", "recursive_doubling", "ring"]

ALL_REDUCE: Registry[Algorithm] = Registry("all-reduce algorithm")
ALL_REDUCE.register("ring")(ring)
ALL_REDUCE.register("segmented_ring")(segmented_ring)
ALL_REDUCE.register("recursive_doubling")(recursive_doubling)
ALL_REDUCE.register("halving_doubling")(halving_doubling)
ALL_REDUCE.register("direct")(direct)
ALL_REDUCE.register("tree")(tree)

ON_NODES: Registry[Callable[[Sequence[Hashable]], Algorithm]] = Registry("all-reduce algorithm")
"""All-reduces that are made for the ranks' nodes: called with the node of each rank."""
ON_NODES.register("hierarchical")(hierarchical)

REDUCE_SCATTER: Registry[Algorithm] = Registry("reduce-scatter algorithm")
REDUCE_SCATTER.register("ring")(ring_reduce_scatter)
REDUCE_SCATTER.register("direct")(direct_reduce_scatter)

ALL_GATHER: Registry[Algorithm] = Registry("all-gather algorithm")
ALL_GATHER.register("ring")(ring_all_gather)
ALL_GATHER.register("direct")(direct_all_gather)

BROADCAST: Registry[Rooted] = Registry("broadcast algorithm")
BROADCAST.register("binomial")(binomial_broadcast)

ALL_TO_ALL: Registry[Algorithm] = Registry("all-to-all algorithm")
ALL_TO_ALL.register("direct")(direct_all_to_all)


# The ring begins to win here. Open MPI 5.0.11, shared memory, float32, medians in us, recursive doubling against ring:
# 2 ranks 64 KiB 130:158, 256 KiB 220:226, 512 KiB 325:297; 4 ranks on 2 cores 256 KiB 1505:2637, 16 MiB 47408:34935.
SMALL_BYTES = 256 << 10


def choose(name: str | Algorithm, n: int, nbytes: int) -> Algorithm:
    """The algorithm a name stands for; "auto" takes recursive doubling up to SMALL_BYTES and the segmented ring above."""
    if not isinstance(name, str):
        return name
    if name == "auto":
        name = "recursive_doubling" if nbytes <= SMALL_BYTES else "segmented_ring"
    return ALL_REDUCE.resolve(name)
