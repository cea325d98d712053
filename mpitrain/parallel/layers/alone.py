"""A channel for a rank that is by itself: what the other ranks would say is made up, in the right shape and dtype."""

from __future__ import annotations

from typing import Any

from mpitrain.backend import Array


class AloneChannel:
    """The channel of rank `rank` of `size`, whose other ranks are elsewhere and have zeros in all that they send."""

    shared, notes = False, ()

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    @property
    def messages(self) -> AloneChannel:
        return self

    def allreduce(self, array: Array, name: str) -> None:
        """The other ranks add nothing."""

    def all_gather(self, array: Array, steps: Any, name: str) -> None:
        self._keep_own(array)

    def all_to_all(self, array: Array, steps: Any, name: str) -> None:
        self._keep_own(array)

    def reduce_scatter(self, array: Array, steps: Any, name: str) -> Array:
        own: Array = array.reshape(self.size, -1)[self.rank]
        return own

    def _keep_own(self, array: Array) -> None:
        parts = array.reshape(self.size, -1)
        parts[:self.rank] = 0
        parts[self.rank + 1:] = 0
