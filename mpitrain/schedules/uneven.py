"""Reduce-scatter and all-gather of parts whose bounds somebody else has chosen, in one round of direct messages.

    bounds (0, 5, 5, 12) for 3 ranks:  rank 0 owns elements 0 to 4, rank 1 none, rank 2 elements 5 to 11

Sums are folded over the fixed binary tree over ranks, as in `direct`, so they have its bits wherever the bounds are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpitrain.schedules.direct import tree_fold
from mpitrain.schedules.steps import Receive, Reduce, Round, Send, Slice, data, inbox, without_empty


@dataclass(frozen=True)
class _Owned:
    bounds: tuple[int, ...]                  # Part i is [bounds[i], bounds[i + 1]).

    def own(self, rank: int) -> Slice:
        """The elements of a rank."""
        return data(self.bounds[rank], self.bounds[rank + 1])


@dataclass(frozen=True)
class SumToOwners(_Owned):
    """Everyone sends each part to its owner, who adds them up; the rest of the data is left as it was."""

    def __call__(self, rank: int, n: int, length: int) -> Iterator[Round]:
        assert len(self.bounds) == n + 1 and self.bounds[-1] == length
        others = [(rank + hop) % n for hop in range(1, n)]    # no two ranks begin with the same peer
        own = self.own(rank)
        size = own.stop - own.start
        places = {peer: inbox(size * i, size * (i + 1)) for i, peer in enumerate(sorted(others))}
        sums: list[Reduce] = tree_fold([places.get(peer, own) for peer in range(n)], own)
        yield without_empty([*(Receive(peer, places[peer]) for peer in reversed(others)),
                             *(Send(peer, self.own(peer)) for peer in others), *sums])


@dataclass(frozen=True)
class OwnersToAll(_Owned):
    """Everyone sends its part to everyone."""

    def __call__(self, rank: int, n: int, length: int) -> Iterator[Round]:
        assert len(self.bounds) == n + 1 and self.bounds[-1] == length
        others = [(rank + hop) % n for hop in range(1, n)]
        yield without_empty([*(Receive(peer, self.own(peer)) for peer in reversed(others)),
                             *(Send(peer, self.own(rank)) for peer in others)])
