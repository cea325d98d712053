"""Sums of micro-batches in one order of addition, whatever the number of ranks: a binary tree over the micro-batch index.

The node [a, b) of the tree over micro-batches 0 .. M-1 is the sum of two nodes: its first 2^k micro-batches (`tree_split`), and
the rest. A rank adds up those nodes that lie in its own micro-batches; ranks complete the tree:

    M = 6, ranks 0 to 2                           [0,6)
                                        [0,4)             [4,6)
                                   [0,2)     [2,4)
                                   0   1     2   3        4   5
    rank                           0   0     1   1        2   2       each rank holds one node of the tree
    rank, of 2                     0   0     0 | 1        1   1       rank 0 holds [0,2) and 2, rank 1 holds 3 and [4,6)

Every element has this one order of addition, so neither bucket bounds nor the way the messages take can change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TypeAlias

from mpitrain.schedules.halving import halve_and_double, recursive_doubling
from mpitrain.schedules.ring import ring_all_gather
from mpitrain.schedules.steps import Copy, Receive, Reduce, Round, Send, Slice, inbox, part, tree_split, without_empty

Node: TypeAlias = tuple[int, int]               # micro-batches [start, stop)

# Both ways of exchanging give the same bits. Sums of at most so many elements travel whole, in few messages; longer ones are
# halved: the bytes of a ring.
WHOLE_ELEMENTS = 64 << 10


def share(rank: int, n: int, n_micro: int) -> Node:
    """Rank r of n runs micro-batches [rM/n, (r+1)M/n)."""
    return rank * n_micro // n, (rank + 1) * n_micro // n


def halves(node: Node) -> tuple[Node, Node]:
    """The two nodes whose sum a node of more than one micro-batch is."""
    start, stop = node
    middle = start + tree_split(stop - start)
    return (start, middle), (middle, stop)


def cover(within: Node, n_micro: int) -> list[Node]:
    """The largest nodes of the tree inside some consecutive micro-batches, in order; at most 2 log2(M)."""
    def inside(node: Node) -> Iterator[Node]:
        if within[0] <= node[0] and node[1] <= within[1]:
            yield node
        elif node[0] < within[1] and within[0] < node[1]:
            for half in halves(node):
                yield from inside(half)
    return list(inside((0, n_micro))) if within[0] < within[1] else []


def joins(left: Node, right: Node, n_micro: int) -> bool:
    """Whether two neighbouring nodes are the halves of one."""
    node = 0, n_micro
    while node[1] - node[0] > 1:
        below, above = halves(node)
        if (below, above) == (left, right):
            return True
        node = below if right[1] <= below[1] else above
    return False


def are_equal(left: Node, right: Node) -> bool:
    """Whether two neighbouring nodes are of equally many micro-batches: the halves of a node of a rank's own tree."""
    return left[1] - left[0] == right[1] - right[0]


class Counter:
    """Sums of micro-batches that come one after the other, kept like the digits of a binary counter.

    `nodes` says which micro-batches each sum is of, oldest first; two neighbours that `join` are added at once, so log2(M) + 1
    sums are enough for M micro-batches. The sums themselves are the caller's: `add(k)` is to add number k + 1 to number k.
    """

    def __init__(self, join: Callable[[Node, Node], bool] = are_equal):
        self.join = join
        self.nodes: list[Node] = []

    def push(self, leaf: int, add: Callable[[int], None]) -> None:
        """Micro-batch `leaf` is the newest sum."""
        self.nodes.append((leaf, leaf + 1))
        while len(self.nodes) > 1 and self.join(*self.nodes[-2:]):
            self.fold(add)

    def fold(self, add: Callable[[int], None]) -> None:
        """Replaces the two newest sums by their sum."""
        self.nodes[-2:] = [(self.nodes[-2][0], self.nodes[-1][1])]
        add(len(self.nodes) - 1)


@cache
def nodes_of(n_micro: int, n: int) -> tuple[tuple[Node, ...], ...]:
    """For each rank the nodes it holds: a function of M and n, so all ranks know everyone's."""
    return tuple(tuple(cover(share(rank, n, n_micro), n_micro)) for rank in range(n))


def width(n_micro: int, n: int) -> int:
    """How many sums the data of each rank has room for: the most that any of them holds."""
    return max(map(len, nodes_of(n_micro, n)))


def micro_tree(rank: int, n: int, length: int, n_micro: int) -> Iterator[Round]:
    """All-reduce of sub-trees. `length` is that of the data: `width` sums one after another, this rank's nodes in order.

    The result stands where the first sum was, on every rank. Where each rank holds one node and the ranks are a power of
    two, they exchange with partners at distance 1, 2, 4, ...; else the owner of a part receives everyone's nodes.
    """
    assert 0 < n <= n_micro and length % width(n_micro, n) == 0, "as many sums as a rank holds at most, all of one length"
    if n == 1:
        return iter(())
    if n & (n - 1) == 0 and n_micro & (n_micro - 1) == 0:
        return recursive_doubling(rank, n, length) if length <= WHOLE_ELEMENTS else halve_and_double(rank, n, length)
    return _owners_fold(rank, n, length // width(n_micro, n), n_micro)


def _owners_fold(rank: int, n: int, length: int, n_micro: int) -> Iterator[Round]:
    """Part i of every sum goes to rank i, which folds them in the order of the tree; then the parts travel round the ring."""
    holders = nodes_of(n_micro, n)
    mine = part(rank, n, length)
    where: dict[Node, Slice] = {node: _moved(mine, slot * length) for slot, node in enumerate(holders[rank])}
    messages: Round = []
    arrived = 0
    for distance in range(1, n):                              # No two ranks send to the same one first.
        peer = (rank + distance) % n
        for node in holders[peer]:
            where[node] = inbox(arrived, arrived + mine.length)
            arrived += mine.length
            messages.append(Receive(peer, where[node]))
        messages += [Send(peer, _moved(part(peer, n, length), slot * length)) for slot in range(len(holders[rank]))]
    total = _fold((0, n_micro), where, messages)
    if total != mine:
        messages.append(Copy(total, mine))
    yield without_empty(messages)
    yield from ring_all_gather(rank, n, length)


def _fold(node: Node, where: dict[Node, Slice], steps: Round) -> Slice:
    """Appends the additions that make `node` out of the nodes at hand; where its sum is afterwards."""
    if node in where:
        return where[node]
    left, right = (_fold(half, where, steps) for half in halves(node))
    steps.append(Reduce(left, right, left))
    return left


def _moved(part_: Slice, by: int) -> Slice:
    return Slice(part_.buffer, part_.start + by, part_.stop + by)


class RankTree:
    """The `nodes` of rank `rank` of `n` in the tree over `n_micro` micro-batches, of which first:stop are its own."""

    def __init__(self, n_micro: int, rank: int, n: int):
        self.n_micro, self.n = n_micro, n
        self.first, self.stop = share(rank, n, n_micro)
        self.nodes = nodes_of(n_micro, n)[rank]
        self.width = width(n_micro, n)
        self.joins = partial(joins, n_micro=n_micro)           # Whether two neighbouring sums are to be added now.
        self.steps = partial(micro_tree, n_micro=n_micro)      # One object, since channels keep plans by it.
