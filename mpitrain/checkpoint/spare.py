"""Copies of the state in memory, from which the ranks that are left go on when one is lost.

Each rank keeps what it holds, also what another rank would write to a checkpoint, after two steps in turn: while one copy is
being made, the other one is whole. A step can be gone on from if the ranks that are left hold every slice of every array.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpitrain.checkpoint.parts import Piece
from mpitrain.checkpoint.saver import Copies


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


class Spares:
    """The last two copies of this rank, in `kept`, the older one first."""

    def __init__(self) -> None:
        self.kept: list[Spare] = []
        self._memory, self._next = Copies(), Copies()

    def keep(self, step: int, meta: dict[str, Any], pieces: Mapping[str, Piece]) -> None:
        """Copies the state after a step, into the memory of the older copy."""
        self.kept = self.kept[-1:]
        copies = self._next.of(list(pieces.values()))
        self._memory, self._next = self._next, self._memory
        self.kept.append(Spare(step, meta, dict(zip(pieces, copies, strict=True))))


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
