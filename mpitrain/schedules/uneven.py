"""Reduce-scatter and all-gather of parts whose bounds the caller has chosen (MPI's "v" collectives), in one round of messages.

    bounds (0, 5, 5, 12) for 3 ranks:  rank 0 owns elements 0 to 4, rank 1 none, rank 2 elements 5 to 11

Sums are folded over the fixed binary tree over ranks, as in `direct`, so they have its bits wherever the bounds are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpitrain.schedules.direct import from_owners, to_owners
from mpitrain.schedules.steps import Round, Slice, data


@dataclass(frozen=True)
class _Owned:
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
