"""The parts of a model that leave one after the other: which parameter is in which, and where it lies on a rank.

Fragments are cut between the parameters of the whole model, so that they do not depend on how it is cut over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from mpitrain.backend import Array
from mpitrain.optim import Segment


def cut(sizes: Sequence[int], parts: int) -> list[int]:
    """Numbers of consecutive sizes, at least one each, whose sums have the smallest maximum that `parts` of them can have."""
    assert 1 <= parts <= len(sizes)
    low, high = max(max(sizes), -(-sum(sizes) // parts)), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(sizes, middle)) <= parts else (middle + 1, high)
    found = _filled(sizes, low)
    while len(found) < parts:                                 # Fewer are enough for the maximum: the longest lists are halved.
        longest = max(range(len(found)), key=lambda i: found[i])
        found[longest:longest + 1] = [found[longest] - found[longest] // 2, found[longest] // 2]
    return found


def _filled(sizes: Sequence[int], most: int) -> list[int]:
    """Numbers of consecutive sizes that are filled up to `most`, one after the other."""
    found, held = [0], 0
    for size in sizes:
        if found[-1] and held + size > most:
            found.append(0)
            held = 0
        found[-1] += 1
        held += size
    return found


def fragments_of(parameters: Sequence[tuple[str, int]], parts: int) -> dict[str, int]:
    """The number of the fragment of each parameter of the whole model, (name, size), by name."""
    counts = cut([size for _, size in parameters], parts)
    bounds = [0, *accumulate(counts)]
    return {name: k for k in range(parts) for name, _ in parameters[bounds[k]:bounds[k + 1]]}


class Fragment:
    """The parts of parameters of one fragment that this rank updates, and the array in which they travel.

    `places` says where each lies in the message.
    """

    def __init__(self, number: int, segments: Sequence[Segment], storage: Any):
        self.number, self.segments = number, list(segments)
        self.places: list[tuple[Segment, slice]] = []
        at = 0
        for s in self.segments:
            size = s.stop - s.start
            self.places.append((s, slice(at, at + size)))
            at += size
        self.size = at
        self.message: Array = storage.memory(at)
        self.message.fill(0)

    def parts(self, flat: Array) -> list[tuple[Segment, Array]]:
        """The parts of parameters in an array that lies as the message does."""
        return [(s, flat[there]) for s, there in self.places]

    def pack(self, flat: Any) -> None:
        """Copies this fragment's part of an array in the storage's layout into the message."""
        for s, there in self.places:
            self.message[there] = flat[s.start:s.stop]

    def unpack(self, flat: Any) -> None:
        """The way back."""
        for s, there in self.places:
            flat[s.start:s.stop][...] = self.message[there]
