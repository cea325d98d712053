"""Algorithms in which every rank talks to every other at once: two messages' latency, the sum in one fixed order.

The sums are folded over the fixed binary tree over ranks, so that they have the same bits whoever owns a part, at any n and
with any bounds of the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpitrain.schedules.halving import halving_doubling
from mpitrain.schedules.ring import ring_all_gather
from mpitrain.schedules.steps import Receive, Reduce, Round, Send, Slice, cut, data, inbox, rotating, tree_split, without_empty


def tree_fold(operands: Sequence[Slice], into: Slice) -> list[Reduce]:
    """The sum of at least two operands in the order of the fixed binary tree; overwrites operands, `into` may be one of them."""
    if len(operands) == 1:
        return []
    split = tree_split(len(operands))
    left, right = operands[:split], operands[split:]
    return [*tree_fold(left, left[0]), *tree_fold(right, right[0]), Reduce(left[0], right[0], into)]


def to_owners(rank: int, n: int, owned: Sequence[Slice]) -> Iterator[Round]:
    """Everyone sends each part of the data to its owner, rank i for owned[i], which adds the parts up in tree order."""
    others = [(rank + hop) % n for hop in range(1, n)]        # No two ranks begin with the same peer.
    sends = [Send(peer, owned[peer]) for peer in others if peer < len(owned)]
    if rank >= len(owned):
        yield without_empty([*sends])
        return
    own = owned[rank]
    size = own.length
    places = {peer: inbox(size * i, size * (i + 1)) for i, peer in enumerate(sorted(others))}
    operands = [places.get(peer, own) for peer in range(n)]
    yield without_empty([*(Receive(peer, places[peer]) for peer in reversed(others)), *sends, *tree_fold(operands, own)])


def from_owners(rank: int, n: int, owned: Sequence[Slice]) -> Iterator[Round]:
    """Each owner of a part of the data, rank i for owned[i], sends it to everyone."""
    others = [(rank + hop) % n for hop in range(1, n)]
    receives = [Receive(peer, owned[peer]) for peer in reversed(others) if peer < len(owned)]
    sends = [Send(peer, owned[rank]) for peer in others] if rank < len(owned) else []
    yield without_empty([*receives, *sends])


@rotating
def direct_reduce_scatter(rank: int, n: int, length: int) -> Iterator[Round]:
    """Everyone sends each part to its owner, who adds them up in tree order: one round, n - 1 messages each."""
    return to_owners(rank, n, cut(n, length))


@rotating
def direct_all_gather(rank: int, n: int, length: int) -> Iterator[Round]:
    """Everyone sends its part to everyone: one round, n - 1 messages each."""
    return from_owners(rank, n, cut(n, length))


@rotating
def direct(rank: int, n: int, length: int) -> Iterator[Round]:
    """Parts to their owners, sums to everyone: two rounds, as few bytes as the ring, the bits of the fixed binary tree."""
    owned = cut(n, length)
    yield from to_owners(rank, n, owned)
    yield from from_owners(rank, n, owned)


def tree(rank: int, n: int, length: int) -> Iterator[Round]:
    """At any n the bits of the fixed binary tree over ranks, for as few bytes as the ring.

    For powers of two this is halving and doubling; else the owner of a part adds all contributions to it, and finished parts
    go around the ring. (The ring itself adds each part in another order, and so gives other bits at another n.)
    """
    if n & (n - 1) == 0:
        yield from halving_doubling(rank, n, length)
    else:
        yield from direct_reduce_scatter(rank, n, length)
        yield from ring_all_gather(rank, n, length)


@dataclass(frozen=True)
class _Owned:
    """Parts whose bounds the caller has chosen, as in MPI's "v" collectives.

        bounds (0, 5, 5, 12) for 3 ranks:  rank 0 owns elements 0 to 4, rank 1 none, rank 2 elements 5 to 11
    """

    bounds: tuple[int, ...]                  # Part i is [bounds[i], bounds[i + 1]).

    def parts(self, n: int, length: int) -> list[Slice]:
        """The elements of each rank."""
        assert len(self.bounds) == n + 1 and self.bounds[-1] == length
        return [data(start, stop) for start, stop in zip(self.bounds, self.bounds[1:])]


@dataclass(frozen=True)
class SumToOwners(_Owned):
    """Everyone sends each part to its owner, who adds them up; the rest of the data is left as it was."""

    def __call__(self, rank: int, n: int, length: int) -> Iterator[Round]:
        return to_owners(rank, n, self.parts(n, length))


@dataclass(frozen=True)
class OwnersToAll(_Owned):
    """Everyone sends its part to everyone."""

    def __call__(self, rank: int, n: int, length: int) -> Iterator[Round]:
        return from_owners(rank, n, self.parts(n, length))
