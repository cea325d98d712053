"""All-reduce on several nodes: as little as possible travels between them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from mpitrain.schedules.direct import from_owners, to_owners
from mpitrain.schedules.ring import ring
from mpitrain.schedules.steps import Algorithm, Round, ScheduleError, cut, moved


def hierarchical(nodes: Sequence[Hashable]) -> Algorithm:
    """An all-reduce for ranks on `nodes` (nodes[rank] is whatever names the rank's node).

    Inside each node part i goes to the node's i-th rank, the i-th ranks of all nodes run a ring on it, and send the sum to
    everyone on their nodes. Between nodes travels 2 (m-1)/m of the data for m nodes, over as many links as the smallest
    node has ranks; on larger nodes the other ranks only give and take.

        nodes = "aabb":   0 <-> 1, 2 <-> 3   |   0 <-> 2, 1 <-> 3   |   0 <-> 1, 2 <-> 3
    """
    groups: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        groups.setdefault(node, []).append(rank)
    owners = min(map(len, groups.values()), default=0)
    across = [[group[index] for group in groups.values()] for index in range(owners)]

    def on_nodes(rank: int, n: int, length: int) -> Iterator[Round]:
        if n != len(nodes):
            raise ScheduleError(f"this hierarchical all-reduce was made for {len(nodes)} ranks and is run by {n}; "
                                f"give it the node of each of the {n} ranks")
        group = groups[nodes[rank]]
        index = group.index(rank)
        owned = cut(owners, length)
        yield from moved(to_owners(index, len(group), owned), ranks=group)
        if index < owners:
            mine, peers = owned[index], across[index]
            yield from moved(ring(peers.index(rank), len(peers), mine.length), ranks=peers, data_by=mine.start)
        yield from moved(from_owners(index, len(group), owned), ranks=group)

    return on_nodes
