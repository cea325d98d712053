"""The checks of collectives that no user brings: reduce-scatter, all-gather, broadcast, all-to-all, and the order of sums."""

from __future__ import annotations

from functools import partial

from mpitrain.schedules.check import check_sums, contributions, run
from mpitrain.schedules.steps import Algorithm, Rooted, ScheduleError, Slice, part, tree_split
from mpitrain.schedules.values import Memory, Run, Symbols


def check_reduce_scatter(algorithm: Algorithm, n: int, length: int) -> None:
    """ScheduleError unless part i of rank i ends as the sum of each rank's contribution exactly once."""
    symbols = Symbols()
    for rank, result in enumerate(run(algorithm, contributions(symbols, n, length), length, symbols)):
        check_sums(symbols, result.runs(*bounds(part(rank, n, length))), rank, n)


def check_tree(algorithm: Algorithm, n: int, length: int, *, scattered: bool = False) -> None:
    """ScheduleError unless sums are added up as the fixed binary tree over ranks does: ((0 + 1) + (2 + 3)) + 4.

    Of an all-reduce that is everything on every rank; of a reduce-scatter (`scattered`), part i on rank i.
    """
    symbols = Symbols()

    def sums(low: int, high: int) -> int:
        if high - low == 1:
            return symbols.leaf(low)
        middle = low + tree_split(high - low)
        return symbols.sum(sums(low, middle), sums(middle, high))

    expected = sums(0, n)
    for rank, result in enumerate(run(algorithm, contributions(symbols, n, length), length, symbols)):
        own = part(rank, n, length) if scattered else part(0, 1, length)
        for found in result.runs(*bounds(own)):
            if (found.symbol, found.shift) != (expected, 0):
                raise ScheduleError(f"rank {rank} of {n} does not add element {found.start} in the order of the binary tree over "
                                    f"ranks")


def check_all_gather(algorithm: Algorithm, n: int, length: int) -> None:
    """ScheduleError unless every rank ends with part i of each rank i; reading others' parts before they came is one too."""
    symbols = Symbols()
    parts = [Run(*bounds(part(rank, n, length)), symbols.leaf(rank), 0) for rank in range(n)]
    for rank, result in enumerate(run(algorithm, [Memory([own]) for own in parts], length, symbols)):
        for owner, theirs in enumerate(parts):
            if theirs.start < theirs.stop and result.runs(theirs.start, theirs.stop) != [theirs]:
                raise ScheduleError(f"rank {rank} of {n} does not end with part {owner} of rank {owner}")


def check_broadcast(algorithm: Rooted, n: int, length: int, root: int = 0) -> None:
    """ScheduleError unless every rank ends with the root's data."""
    symbols = Symbols()
    expected = [Run(0, length, symbols.leaf(root), 0)]
    memories = [Memory(expected if rank == root else ()) for rank in range(n)]
    for rank, result in enumerate(run(partial(algorithm, root=root), memories, length, symbols)):
        if length and result.runs(0, length) != expected:
            raise ScheduleError(f"rank {rank} of {n} does not end with the data of rank {root}")


def check_all_to_all(algorithm: Algorithm, n: int, length: int) -> None:
    """ScheduleError unless part i of rank r ends as what was part r of rank i, for all r and i."""
    symbols = Symbols()
    for rank, result in enumerate(run(algorithm, contributions(symbols, n, length), length, symbols)):
        meant = part(rank, n, length)
        for other in range(n):
            start, stop = bounds(part(other, n, length))
            if start < stop and result.runs(start, stop) != [Run(start, stop, symbols.leaf(other), meant.start - start)]:
                raise ScheduleError(f"rank {rank} of {n} does not end with what rank {other} had for it in its part {other}")


def bounds(piece: Slice) -> tuple[int, int]:
    return piece.start, piece.stop
