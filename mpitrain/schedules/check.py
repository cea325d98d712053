"""Proves a collective for all ranks at once, without MPI: what is sent is received, nothing deadlocks, the result is right.

Each check raises ScheduleError, naming rank and round, for messages without a match or of two lengths, ranks that wait for
each other in a circle, messages and lanes that race for memory, and a result that is not the operation's.
"""

from __future__ import annotations

from functools import partial

from mpitrain.schedules.rendezvous import EMPTY, Symbols, check_lanes, execute
from mpitrain.schedules.steps import Algorithm, Laned, Rooted, ScheduleError, part, tree_split

__all__ = ["ScheduleError", "check_all_gather", "check_all_reduce", "check_all_to_all", "check_broadcast", "check_reduce_scatter",
           "check_tree"]


def check_all_reduce(algorithm: Algorithm, n: int, length: int) -> None:
    """ScheduleError unless every rank ends with each rank's contribution exactly once, added in the same order everywhere."""
    symbols = Symbols()
    results = run(algorithm, contributions(symbols, n, length), symbols)
    for index in range(length):
        for rank, result in enumerate(results):
            if rank == 0 or result[index] != results[0][index]:
                check_sum(symbols, result[index], rank, n, index)
            if result[index] != results[0][index]:
                raise ScheduleError(f"ranks 0 and {rank} of {n} add element {index} in different orders, "
                                    f"so their bits would differ")


def check_reduce_scatter(algorithm: Algorithm, n: int, length: int) -> None:
    """ScheduleError unless part i of rank i ends as the sum of each rank's contribution exactly once."""
    symbols = Symbols()
    for rank, result in enumerate(run(algorithm, contributions(symbols, n, length), symbols)):
        own = part(rank, n, length)
        for index in range(own.start, own.stop):
            check_sum(symbols, result[index], rank, n, index)


def check_tree(algorithm: Algorithm, n: int, length: int, *, scattered: bool = False) -> None:
    """ScheduleError unless sums are added up as the fixed binary tree over ranks does: ((0 + 1) + (2 + 3)) + 4.

    Of an all-reduce that is everything on every rank; of a reduce-scatter (`scattered`), part i on rank i.
    """
    symbols = Symbols()

    def sums(low: int, high: int, index: int) -> int:
        if high - low == 1:
            return symbols.leaf(low, index)
        middle = low + tree_split(high - low)
        return symbols.sum(sums(low, middle, index), sums(middle, high, index))

    expected = [sums(0, n, index) for index in range(length)]
    for rank, result in enumerate(run(algorithm, contributions(symbols, n, length), symbols)):
        own = part(rank, n, length) if scattered else part(0, 1, length)
        for index in range(own.start, own.stop):
            if result[index] != expected[index]:
                raise ScheduleError(f"rank {rank} of {n} does not add element {index} in the order of the binary tree over ranks")


def check_all_gather(algorithm: Algorithm, n: int, length: int) -> None:
    """ScheduleError unless every rank ends with part i of each rank i; reading others' parts before they came is one too."""
    symbols = Symbols()
    expected = [symbols.leaf(rank, index) for rank in range(n) for index in range(*part(rank, n, length)[1:])]
    memories = [[EMPTY] * length for _ in range(n)]
    for rank, memory in enumerate(memories):
        own = part(rank, n, length)
        memory[own.start:own.stop] = expected[own.start:own.stop]
    for rank, result in enumerate(run(algorithm, memories, symbols)):
        for owner in range(n):
            theirs = part(owner, n, length)
            if result[theirs.start:theirs.stop] != expected[theirs.start:theirs.stop]:
                raise ScheduleError(f"rank {rank} of {n} does not end with part {owner} of rank {owner}")


def check_broadcast(algorithm: Rooted, n: int, length: int, root: int = 0) -> None:
    """ScheduleError unless every rank ends with the root's data."""
    symbols = Symbols()
    expected = [symbols.leaf(root, index) for index in range(length)]
    memories = [list(expected) if rank == root else [EMPTY] * length for rank in range(n)]
    for rank, result in enumerate(run(partial(algorithm, root=root), memories, symbols)):
        if result != expected:
            raise ScheduleError(f"rank {rank} of {n} does not end with the data of rank {root}")


def check_all_to_all(algorithm: Algorithm, n: int, length: int) -> None:
    """ScheduleError unless part i of rank r ends as what was part r of rank i, for all r and i."""
    symbols = Symbols()
    for rank, result in enumerate(run(algorithm, contributions(symbols, n, length), symbols)):
        meant = part(rank, n, length)
        for other in range(n):
            place = part(other, n, length)
            if result[place.start:place.stop] != [symbols.leaf(other, index) for index in range(meant.start, meant.stop)]:
                raise ScheduleError(f"rank {rank} of {n} does not end with what rank {other} had for it in its part {other}")


def contributions(symbols: Symbols, n: int, length: int) -> list[list[int]]:
    return [[symbols.leaf(rank, index) for index in range(length)] for rank in range(n)]


def check_sum(symbols: Symbols, symbol: int, rank: int, n: int, index: int) -> None:
    """ScheduleError unless a result of `rank` adds up element `index` of each of n ranks once."""
    size = 0 if symbol == EMPTY else symbols.sizes[symbol]
    found = [tuple(leaf) for leaf in symbols.leaves(symbol)] if 0 < size <= 2 * n else f"{size} contributions"
    if found != [(other, index) for other in range(n)]:
        raise ScheduleError(f"rank {rank} of {n} ends with the sum of {found} in element {index}; "
                            f"it should be element {index} of each rank once")


def run(algorithm: Algorithm, memories: list[list[int]], symbols: Symbols) -> list[list[int]]:
    """What the ranks' data hold at the end, its rounds one after the other; lanes are also run each by itself."""
    n, length = len(memories), len(memories[0])
    if isinstance(algorithm, Laned):
        apart = [list(memory) for memory in memories]
        run_lanes(algorithm, apart, symbols)
    execute([list(algorithm(rank, n, length)) for rank in range(n)], memories, symbols)
    if isinstance(algorithm, Laned) and apart != memories:
        raise ScheduleError(f"lanes on {n} ranks compute something else than their rounds in turn")
    return memories


def run_lanes(algorithm: Laned, memories: list[list[int]], symbols: Symbols) -> None:
    n, length = len(memories), len(memories[0])
    programs = [[list(rounds) for rounds in algorithm.lanes(rank, n, length)] for rank in range(n)]
    for rank, lanes in enumerate(programs):
        check_lanes(lanes, rank)
        if len(lanes) != len(programs[0]):
            raise ScheduleError(f"rank 0 of {n} has {len(programs[0])} lanes, rank {rank} has {len(lanes)}")
    for lane in zip(*programs):
        execute(lane, memories, symbols)
