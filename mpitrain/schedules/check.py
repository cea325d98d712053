"""Proves a collective for all ranks at once, without MPI: what is sent is received, nothing deadlocks, the result is right.

Each check raises ScheduleError, naming rank and round, for messages without a match or of two lengths, ranks that wait for
each other in a circle, messages that race for memory, and a result that is not the operation's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpitrain.schedules.calling import called
from mpitrain.schedules.rendezvous import execute
from mpitrain.schedules.steps import Algorithm, ScheduleError
from mpitrain.schedules.values import EMPTY, Memory, Run, Symbols, paired


def check_all_reduce(algorithm: Algorithm, n: int, length: int) -> None:
    """ScheduleError unless every rank ends with each rank's contribution exactly once, added in the same order everywhere."""
    symbols = Symbols()
    first, *others = (result.runs(0, length) for result in run(algorithm, contributions(symbols, n, length), length, symbols))
    check_sums(symbols, first, 0, n)
    for rank, different in differences(first, others):
        check_sums(symbols, [different], rank, n)
        raise ScheduleError(f"ranks 0 and {rank} of {n} add element {different.start} in different orders, "
                            f"so their bits would differ")


def check_rounded(algorithm: Algorithm, n: int, length: int, packing: str) -> None:
    """ScheduleError unless an all-reduce that is right ends alike on all ranks where what is sent is rounded to `packing`."""
    symbols = Symbols()
    results = run(algorithm, contributions(symbols, n, length), length, symbols, rounded=True)
    first, *others = ([found._replace(symbol=symbols.rounded(found.symbol)) for found in result.runs(0, length)]
                      for result in results)
    for rank, different in differences(first, others):
        raise ScheduleError(f"ranks 0 and {rank} of {n} end with different bits in element {different.start} where messages "
                            f"hold {packing}: one adds a value before it sends it, the other as it came; send values before "
                            f'they are added, or set comm.wire_dtype = "float32"')


def differences(first: Sequence[Run], others: Sequence[Sequence[Run]]) -> Iterator[tuple[int, Run]]:
    """(rank, run) of the other ranks' results that are not the first rank's."""
    for rank, result in enumerate(others, 1):
        yield from ((rank, mine) for mine, theirs in paired(result, first) if mine != theirs)


def contributions(symbols: Symbols, n: int, length: int) -> list[Memory]:
    """Each rank's data: its own leaf in every element."""
    return [Memory([Run(0, length, symbols.leaf(rank), 0)]) for rank in range(n)]


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
