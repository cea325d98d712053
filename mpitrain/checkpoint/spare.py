"""Copies of the state in memory, from which the ranks that are left go on when one is lost.

Each rank keeps what it holds, also what another rank would write to a checkpoint, after two steps in turn: while one copy is
being made, the other one is whole. Where ranks hold slices of their own, each also keeps those of another rank, on another node
if there is one (`keepers`). A step can be gone on from if the ranks that are left hold every slice of every array.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpitrain.checkpoint.parts import Piece
from mpitrain.checkpoint.saver import Snapshot, arrays
from mpitrain.comm.face import Objects
from mpitrain.comm.messages.buffers import Host
from mpitrain.comm.messages.link import Link
from mpitrain.parallel.pipeline.nonfinite import is_finite


class Spare(NamedTuple):
    """A copy of what one rank held after a step; `pieces` by their names in part files."""

    step: int
    meta: dict[str, Any]
    pieces: dict[str, Piece]

    def sizes(self) -> dict[str, list[Any]]:
        """The array's name and the number of elements of each piece, as JSON."""
        return {key: [piece.name, piece.array.size] for key, piece in self.pieces.items()}

    def sums(self) -> dict[str, str]:
        """The SHA-256 of each piece."""
        return {key: hashlib.sha256(piece.array.data).hexdigest() for key, piece in self.pieces.items()}


def keepers(hosts: Sequence[str]) -> list[int]:
    """Which rank keeps the copies of each rank; `hosts` are the ranks'. Every rank keeps those of one.

    A keeper is on another node, so that a node may be lost as a whole, unless one node has more than half of the ranks: ranks
    stand in the order of their nodes, and a copy goes as many places on as the largest node has ranks.
    """
    order = sorted(range(len(hosts)), key=lambda rank: hosts.index(hosts[rank]))
    most = max(map(hosts.count, set(hosts)))
    places = most if most < len(hosts) else 1
    found = dict(zip(order, order[places:] + order[:places], strict=True))
    return [found[rank] for rank in range(len(hosts))]


class Neighbour:
    """The rank whose copies this one keeps too, of slices that no other rank holds, and the one that keeps this one's."""

    def __init__(self, link: Link, channel: Objects, hosts: Sequence[str]):
        self._link, self._channel = link, channel
        keeper = keepers(hosts)
        self._before, self._behind = keeper.index(link.rank), keeper[link.rank]
        self._known: list[list[Any]] = []

    def swap(self, own: Mapping[str, Piece], memory: list[Host]) -> dict[str, Piece]:
        """The pieces of that rank, in `memory`, which is filled at the first call; `own` go to the other one.

        All ranks call it alike; it communicates.
        """
        link, before, behind = self._link, self._before, self._behind
        if not self._known:
            self._known = self._channel.gather_objects([[key, one.name, one.array.dtype.name, one.array.shape, one.global_shape,
                                                         one.start] for key, one in own.items()])[before]
        if not memory:
            memory += arrays([(tuple(shape), np.dtype(kind)) for _, _, kind, shape, _, _ in self._known])
        coming = [link.receive(array.shape, array.dtype, before, tag, f"a copy of {known[0]}", into=array)
                  for tag, (known, array) in enumerate(zip(self._known, memory, strict=True))]
        leaving = [link.send(one.array, behind, tag, f"a copy of {key}") for tag, (key, one) in enumerate(own.items())]
        for message in (*coming, *leaving):
            message.wait()
        return {key: Piece(name, array, tuple(whole), tuple(start))
                for (key, name, _, _, whole, start), array in zip(self._known, memory, strict=True)}


class Spares:
    """The last two copies of this rank, and of its `neighbour` where it has one, in `kept`, the older one first."""

    def __init__(self, neighbour: Neighbour | None = None) -> None:
        self.kept: list[Spare] = []
        self.neighbour = neighbour
        self._memory: list[tuple[Snapshot, list[Host]]] = [(Snapshot(), []), (Snapshot(), [])]

    def keep(self, step: int, meta: dict[str, Any], pieces: Mapping[str, Piece]) -> None:
        """Copies the state after a step, into the memory of the older copy. It communicates where there is a neighbour."""
        self.kept = self.kept[-1:]
        mine, theirs = self._memory[0]
        own = dict(zip(pieces, mine.of(list(pieces.values())), strict=True))
        other = {} if self.neighbour is None else self.neighbour.swap(own, theirs)
        self._memory.reverse()
        self.kept.append(Spare(step, meta, other | own))

    def sound(self) -> list[Spare]:
        """The copies whose parameters are finite, as those of a checkpoint have to be. One may be taken between the step that
        spoils them and the next one, whose loss ends the run."""
        return [spare for spare in self.kept if all(is_finite(piece.array) for piece in spare.pieces.values()
                                                    if piece.name.startswith("parameters/"))]


def newest_whole(everyone: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]], expected: Mapping[str, Sequence[int]]
                 ) -> tuple[int, dict[str, int]] | None:
    """The newest step of which the ranks hold everything together, and which rank writes each piece; None without one.

    `everyone` has, of each rank, the `Spare.sizes` of its copies by their steps; `expected` the shape of each array.
    """
    for step in sorted({int(step) for held in everyone for step in held}, reverse=True):
        writers, filled = dict[str, int](), dict.fromkeys(expected, 0)
        for rank, held in enumerate(everyone):
            for key, (name, size) in held.get(str(step), {}).items():
                if writers.setdefault(key, rank) == rank:
                    filled[name] = filled.get(name, 0) + size
        if filled == {name: math.prod(shape) for name, shape in expected.items()}:
            return step, writers
    return None


def different(everyone: Sequence[Mapping[str, str]]) -> str:
    """A piece of which two ranks hold different bits, by the ranks' `Spare.sums`; "" if there is none."""
    known: dict[str, str] = {}
    return next((key for sums in everyone for key, found in sums.items() if known.setdefault(key, found) != found), "")
