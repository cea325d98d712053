"""Stand-ins for the ranks that have layers together with this one, so that it runs its part of a model by itself.

What the others would send is made up, of the right size: a copy of what is here, or zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mpitrain.backend import Array, array_module
from mpitrain.parallel.layers.expert_parallel import Across
from mpitrain.parallel.layers.ring_attention import Ring
from mpitrain.parallel.layers.tensor_functions import Group


class LoneGroup(Group):
    """A group of layers that are cut along tp."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def sum(self, array: Array, name: str) -> Array:
        copy: Array = array.copy()
        return copy

    def gather(self, array: Array, dim: int, name: str) -> Array:
        joined: Array = array_module(array).concatenate([array] * self.size, axis=dim)
        return joined

    def scatter(self, array: Array, dim: int, name: str) -> Array:
        copy: Array = self.part(array, dim).copy()
        return copy


class LoneRing(Ring):
    """A ring of positions that are cut along cp."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._rooms = {}

    def receive(self, into: Array, tag: int, what: str) -> Any:
        into.fill(0)
        return Arrived(into)

    def send(self, array: Array, tag: int, what: str) -> Any:
        return Arrived(array)


class Arrived(NamedTuple):
    """A message that is not waited for."""

    array: Array

    def wait(self) -> None:
        """It is there."""


class LoneAcross(Across):
    """The ranks that have the experts of a mixture along ep."""

    def __init__(self, size: int):
        self.size = size

    def most(self, places: int) -> int:
        return places

    def _exchange(self, parts: Array, what: str) -> None:
        """The others send what is there."""
