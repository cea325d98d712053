"""The arrays of a run's state that several ranks hold, compared: a digest of each, and one small message.

    rank 0   [ a | b | c ]        rank 1   [ a | b | d ]        rank 2   [ a | e ]
    compared: a between ranks 0, 1 and 2, b between ranks 0 and 1

Two ranks hold copies of an array where both have it by the same name, and the same part of it.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array, asnumpy
from mpitrain.checkpoint.kinds import Kept, Values
from mpitrain.comm.messages.channel import Channel

RATES = "the learning rates since"                            # the name that their digests have


class Difference(NamedTuple):
    """The first array of which ranks hold different bits, equal on all ranks."""

    name: str                        # as in a checkpoint, or RATES
    holders: list[list[int]]         # the ranks that hold equal bits together, the most numerous first
    hosts: list[str]                 # of all ranks
    differing: int                   # arrays that differ
    rates: list[list[float]]         # of all ranks, where those differ


class Copies:
    """The arrays of `kinds` that other ranks hold too. All ranks of `channel` make one alike and call it alike.

    `is_ours` says whether this rank answers for a kind: ranks that share one copy let the first of them do so. `among` names the
    ranks that have copies of a kind: None for all of them, or the number of a site that has a state of its own.
    """

    def __init__(self, kinds: Sequence[Kept | Values], channel: Channel, is_ours: Callable[[Kept | Values], bool],
                 among: Callable[[Kept | Values], int | None] = lambda kind: None):
        self.kinds, self.channel, self.among = [kind for kind in kinds if is_ours(kind)], channel, among
        self.names = [place[0] for place in self._places()]
        places, seen = list[str](), Counter[str]()
        for place in self._places():                          # a tied parameter may have two places in a rank's memory
            text = " ".join(map(str, place))
            places.append(f"{text} #{seen[text]}")
            seen[text] += 1
        everyone = [places] * channel.size
        if len(set(channel.gather_objects(sha256(repr(places).encode()).hexdigest()))) > 1:
            everyone = channel.gather_objects(places)
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            for there in theirs:
                holders.setdefault(there, []).append(rank)
        everybody = tuple(range(channel.size))
        self.groups = [everybody, *sorted({tuple(h) for h in holders.values() if len(h) > 1} - {everybody})]
        numbers = {group: number for number, group in enumerate(self.groups)}
        self._group = [numbers.get(tuple(holders[place])) for place in places]
        self._order = sorted((i for i, group in enumerate(self._group) if group is not None), key=places.__getitem__)
        self._places_of = places
        ends = np.cumsum([1, *map(len, self.groups)])
        self._slots = [slice(int(a), int(b)) for a, b in zip(ends, ends[1:])]
        self._message = np.zeros(int(ends[-1]), np.int64)     # rank 0's word, and a digest for each rank of each group
        self._add = channel.prepare(self._message, "digests of copies")

    def compare(self, rates: array[float], word: int) -> tuple[int, bool]:
        """Rank 0's `word`, and whether all copies, and the learning rates, have equal bits; it communicates."""
        arrays, message, rank = list(self._arrays()), self._message, self.channel.rank
        sums = [zlib.crc32(rates), *(0 for _ in self.groups[1:])]
        for i in self._order:
            group: Any = self._group[i]
            sums[group] = digest(arrays[i], sums[group])
        message[...] = 0
        message[0] = 0 if rank else word
        for group, slots, found in zip(self.groups, self._slots, sums):
            if rank in group:
                message[slots.start + group.index(rank)] = found
        self._add.run()
        return int(message[0]), all(bool((message[slots] == message[slots.start]).all()) for slots in self._slots)

    def difference(self, rates: array[float], host: str) -> Difference:
        """The first copy that differs, after `compare` has found that one does; it communicates."""
        arrays = list(self._arrays())
        mine = {self._places_of[i]: [self.names[i], digest(arrays[i])] for i in sorted(self._order)}
        everyone = self.channel.gather_objects([host, list(rates), mine])
        hosts, all_rates = [host for host, _, _ in everyone], [rates for _, rates, _ in everyone]
        found: dict[str, dict[int, list[int]]] = {}
        if any(other != all_rates[0] for other in all_rates):
            return Difference(RATES, _alike([repr(rates) for rates in all_rates]), hosts, 1, all_rates)
        for rank, (_, _, theirs) in enumerate(everyone):
            for place, (_, value) in theirs.items():
                found.setdefault(place, {}).setdefault(value, []).append(rank)
        names = {place: name for _, _, theirs in everyone for place, (name, _) in theirs.items()}
        different = [place for place, by_value in found.items() if len(by_value) > 1]
        if not different:                                     # they were equal when they were read again
            return Difference("", [list(range(len(hosts)))], hosts, 0, [])
        holders = sorted(found[different[0]].values(), key=lambda ranks: (-len(ranks), ranks))
        return Difference(names[different[0]], holders, hosts, len(different), [])

    def _places(self) -> Iterator[tuple[Any, ...]]:
        """(name, and the part of the whole array) of each array, in the order of `_arrays`."""
        for kind in self.kinds:
            if isinstance(kind, Values):
                yield from ((f"{kind.prefix}/{name}", self.among(kind)) for name in kind.get())
            else:
                yield from ((kind.name(one.leaf), one.leaf.offset, one.leaf.shape, one.first, one.array.size, self.among(kind))
                            for one in kind.placed())

    def _arrays(self) -> Iterator[Array]:
        for kind in self.kinds:
            if isinstance(kind, Values):
                yield from map(np.asarray, kind.get().values())
            else:
                yield from (one.array for one in kind.placed())


def digest(values: Array, before: int = 0) -> int:
    """CRC-32 of the bytes of an array, behind those of the digest `before`."""
    return zlib.crc32(np.ascontiguousarray(asnumpy(values)).reshape(-1).view(np.uint8).data, before)


def _alike(values: Sequence[Any]) -> list[list[int]]:
    """The ranks of equal values together, the most numerous first."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return sorted(ranks.values(), key=lambda found: (-len(found), found))
