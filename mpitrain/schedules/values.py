"""Symbols instead of numbers, and memory that holds them by runs: a proof at a length costs what its slices are many.

A symbol stands for one number at each element: a leaf is what a rank started with, a sum adds one symbol at an element to
another at an element so much further on, a rounded one is what a 16-bit message leaves of it. Memory holds symbols moved by a
shift, which is 0 as long as everything is added where it belongs:

    data     [0, 500): leaf 1, shift 0          element p is what rank 1 had in element p
    inbox    [0, 500): leaf 1, shift 500        element p is what rank 1 had in element p + 500

Equal expressions are one symbol and one shift, so results that are equal here have the same bits for every input.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

EMPTY = -1                                                    # The content of memory that nobody filled; to read it is an error.
LEAF, SUM, ROUNDED = range(3)
MANY = 1 << 60                                                # A symbol that adds up more leaves is not counted any further.


class Leaf(NamedTuple):
    """What `rank` started with, so many elements further on."""

    rank: int
    offset: int


class Run(NamedTuple):
    """Elements [start, stop) of a buffer: element p holds `symbol` at p + `shift`."""

    start: int
    stop: int
    symbol: int
    shift: int


_start = attrgetter("start")


class Symbols:
    """Symbols by number, equal expressions under equal numbers; `sizes[symbol]` is how many leaves it adds up."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int, int, int], int] = {}
        self._parts: list[tuple[int, int, int, int]] = []
        self.sizes: list[int] = []

    def leaf(self, rank: int) -> int:
        return self._number((LEAF, rank, 0, 0), 1)

    def sum(self, left: int, right: int, further: int = 0) -> int:
        """`left` at an element and `right` at one `further` on."""
        return self._number((SUM, left, right, further), min(MANY, self.sizes[left] + self.sizes[right]))

    def rounded(self, symbol: int) -> int:
        """What is left of it in 16 bits; rounding again changes nothing."""
        return symbol if self._parts[symbol][0] == ROUNDED else self._number((ROUNDED, symbol, 0, 0), self.sizes[symbol])

    def leaves(self, symbol: int) -> list[Leaf]:
        """What a symbol adds up, sorted; mind its size before asking."""
        found, stack = [], [(symbol, 0)]
        while stack:
            number, offset = stack.pop()
            kind, first, second, further = self._parts[number]
            if kind == LEAF:
                found.append(Leaf(first, offset))
            else:
                stack.append((first, offset))
            if kind == SUM:
                stack.append((second, offset + further))
        return sorted(found)

    def _number(self, key: tuple[int, int, int, int], size: int) -> int:
        number = self._numbers.setdefault(key, len(self.sizes))
        if number == len(self.sizes):
            self._parts.append(key)
            self.sizes.append(size)
        return number


class Memory:
    """One buffer of a rank, as the fewest runs: no two that touch could be one. What nobody filled is in none."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._runs = [run for run in runs if run.start < run.stop]

    def runs(self, start: int, stop: int) -> list[Run]:
        """What is in [start, stop), gaps as runs of EMPTY."""
        if start >= stop:
            return []
        found, at = [], start
        for run in self._runs[max(0, bisect_right(self._runs, start, key=_start) - 1):]:
            if run.start >= stop:
                break
            if run.stop <= at:
                continue
            if run.start > at:
                found.append(Run(at, run.start, EMPTY, 0))
            found.append(run._replace(start=max(run.start, start), stop=min(run.stop, stop)))
            at = found[-1].stop
        if at < stop:
            found.append(Run(at, stop, EMPTY, 0))
        return found

    def write(self, start: int, stop: int, runs: Sequence[Run]) -> None:
        """`runs`, which make up [start, stop), instead of what is there."""
        if start >= stop:
            return
        first = max(0, bisect_left(self._runs, start, key=_start) - 1)       # That run may reach into the place, or go on in it.
        last = bisect_right(self._runs, stop, key=_start)
        old = self._runs[first:last]
        below = [run._replace(stop=min(run.stop, start)) for run in old if run.start < start]
        above = [run._replace(start=max(run.start, stop)) for run in old if run.stop > stop]
        self._runs[first:last] = joined([*below, *runs, *above])


def joined(runs: Iterable[Run]) -> list[Run]:
    """The same runs, those that go on in the next one made one with it."""
    found: list[Run] = []
    for run in runs:
        if found and found[-1][1:] == (run.start, run.symbol, run.shift):
            run = run._replace(start=found.pop().start)
        found.append(run)
    return found


def shifted(runs: Iterable[Run], by: int) -> list[Run]:
    """The same values, `by` elements further up."""
    return [Run(start + by, stop + by, symbol, shift - by) for start, stop, symbol, shift in runs]


def paired(left: Sequence[Run], right: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Runs over the same elements, cut where either of them begins or ends."""
    found, i, j, at = [], 0, 0, left[0].start if left else 0
    while i < len(left):
        stop = min(left[i].stop, right[j].stop)
        found.append((left[i]._replace(start=at, stop=stop), right[j]._replace(start=at, stop=stop)))
        i, j, at = i + (left[i].stop == stop), j + (right[j].stop == stop), stop
    return found


def added(left: Sequence[Run], right: Sequence[Run], symbols: Symbols) -> list[Run]:
    """The sum of runs over the same elements."""
    return joined(Run(a.start, a.stop, symbols.sum(a.symbol, b.symbol, b.shift - a.shift), a.shift)
                  for a, b in paired(left, right))
