"""Proves a collective for all ranks at once, without MPI: what is sent is received, nothing deadlocks, the result is right.

Each check raises ScheduleError, naming rank and round, for messages without a match or of two lengths, ranks that wait for
each other in a circle, messages that race for memory, and a result that is not the operation's.
"""

from __future__ import annotations

from functools import partial

from mpitrain.schedules.calling import called
from mpitrain.schedules.rendezvous import execute
from mpitrain.schedules.steps import Algorithm, Rooted, ScheduleError, Slice, part, tree_split
from mpitrain.schedules.values import EMPTY, Memory, Run, Symbols, paired


def check_all_reduce(algorithm: Algorithm, n: int, length: int) -> None:
    """ScheduleError unless every rank ends with each rank's contribution exactly once, added in the same order everywhere."""
    symbols = Symbols()
    first, *others = (result.runs(0, length) for result in run(algorithm, contributions(symbols, n, length), length, symbols))
    check_sums(symbols, first, 0, n)
    for rank, result in enumerate(others, 1):
        different = next((mine for mine, theirs in paired(result, first) if mine != theirs), None)
        if different is not None:
            check_sums(symbols, [different], rank, n)
            raise ScheduleError(f"ranks 0 and {rank} of {n} add element {different.start} in different orders, "
                                f"so their bits would differ")


def check_rounded(algorithm: Algorithm, n: int, length: int, packing: str) -> None:
    """ScheduleError unless an all-reduce that is right ends alike on all ranks where what is sent is rounded to `packing`."""
    symbols = Symbols()
    results = run(algorithm, contributions(symbols, n, length), length, symbols, rounded=True)
    first, *others = ([found._replace(symbol=symbols.rounded(found.symbol)) for found in result.runs(0, length)]
                      for result in results)
    for rank, result in enumerate(others, 1):
        different = next((mine for mine, theirs in paired(result, first) if mine != theirs), None)
        if different is not None:
            raise ScheduleError(f"ranks 0 and {rank} of {n} end with different bits in element {different.start} where messages "
                                f"hold {packing}: one adds a value before it sends it, the other as it came; send values before "
                                f'they are added, or set comm.wire_dtype = "float32"')


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
    expected = Memory([Run(0, length, symbols.leaf(root), 0)])
    memories = [expected.copy() if rank == root else Memory() for rank in range(n)]
    for rank, result in enumerate(run(partial(algorithm, root=root), memories, length, symbols)):
        if result != expected:
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


def contributions(symbols: Symbols, n: int, length: int) -> list[Memory]:
    """Each rank's data: its own leaf in every element."""
    return [Memory([Run(0, length, symbols.leaf(rank), 0)]) for rank in range(n)]


def bounds(piece: Slice) -> tuple[int, int]:
    return piece.start, piece.stop


def check_sums(symbols: Symbols, results: list[Run], rank: int, n: int) -> None:
    """ScheduleError unless results of `rank` add up the same element of each of n ranks once."""
    for result in results:
        index = result.start
        size = 0 if result.symbol == EMPTY else symbols.sizes[result.symbol]
        leaves = symbols.leaves(result.symbol) if 0 < size <= 2 * n else []
        if [(leaf.rank, leaf.offset + result.shift) for leaf in leaves] != [(other, 0) for other in range(n)]:
            found = f"{size} contributions" if size > 2 * n else \
                f"{[(leaf.rank, index + result.shift + leaf.offset) for leaf in leaves]}"
            raise ScheduleError(f"rank {rank} of {n} ends with the sum of {found} in element {index}; "
                                f"it should be element {index} of each rank once")


def run(algorithm: Algorithm, memories: list[Memory], length: int, symbols: Symbols, rounded: bool = False) -> list[Memory]:
    """What the ranks' data hold at the end."""
    n = len(memories)
    execute([called(algorithm, rank, n, length) for rank in range(n)], memories, length, symbols, rounded)
    return memories
