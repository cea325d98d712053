"""Algorithms that halve the distance or the data in each round: about log2(n) rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpitrain.schedules.steps import Receive, Reduce, Round, Send, Slice, data, inbox, moved, ordered, without_empty


def folded(rank: int, n: int, length: int, core: Callable[[int, int, int], Iterator[Round]]) -> Iterator[Round]:
    """Runs `core`, which knows powers of two only, on any n: 2 (n - p) ranks (p: the power below n) pair up around it.

    The even one of a pair hands its data to the odd one, sits out, and is told the result:

        n = 5:   0 -> 1   |   (1, 2, 3, 4) run the core   |   1 -> 0
    """
    everything, arrived = data(0, length), inbox(0, length)
    power = 1 << (n.bit_length() - 1)
    paired = 2 * (n - power)
    if not paired:
        yield from core(rank, n, length)
        return
    if rank < paired and rank % 2 == 0:
        yield without_empty([Send(rank + 1, everything)])
        yield without_empty([Receive(rank + 1, everything)])
        return
    if rank < paired:
        yield without_empty([Receive(rank - 1, arrived), Reduce(arrived, everything, everything)])
    ranks = [*range(1, paired, 2), *range(paired, n)]
    yield from moved(core(ranks.index(rank), power, length), ranks=ranks)
    if rank < paired:
        yield without_empty([Send(rank - 1, everything)])


def recursive_doubling(rank: int, n: int, length: int) -> Iterator[Round]:
    """Everything is exchanged with partners at distance 1, 2, 4, ... (Thakur et al., 2005): log2(n) rounds, for small arrays.

    For powers of two the sum is that of the fixed binary tree over ranks; any other n takes two rounds more.
    """
    return folded(rank, n, length, double)


def double(rank: int, n: int, length: int) -> Iterator[Round]:
    everything, arrived = data(0, length), inbox(0, length)
    for bit in range(n.bit_length() - 1):
        peer = rank ^ 1 << bit
        yield without_empty([Receive(peer, arrived), Send(peer, everything),
                             Reduce(*ordered(everything, arrived, rank, peer), everything)])


def halving_doubling(rank: int, n: int, length: int) -> Iterator[Round]:
    """Partners at distance 1, 2, 4, ... share out halves of what they share, then go back the same way and swap results.

    As few bytes as the ring in 2 log2(n) rounds (Rabenseifner, 2004, who begins with the far partners). Beginning with the
    near ones makes the sum, for powers of two, that of the fixed binary tree over ranks: ((0 + 1) + (2 + 3)) + ...
    """
    return folded(rank, n, length, halve_and_double)


def halve_and_double(rank: int, n: int, length: int) -> Iterator[Round]:
    span = data(0, length)
    way: list[tuple[int, Slice, Slice]] = []
    for bit in range(n.bit_length() - 1):
        peer, middle = rank ^ 1 << bit, (span.start + span.stop) // 2
        lower, upper = data(span.start, middle), data(middle, span.stop)
        kept, given = (lower, upper) if rank < peer else (upper, lower)
        arrived = inbox(0, kept.length)
        yield without_empty([Receive(peer, arrived), Send(peer, given), Reduce(*ordered(kept, arrived, rank, peer), kept)])
        way.append((peer, kept, given))
        span = kept
    for peer, kept, given in reversed(way):
        yield without_empty([Receive(peer, given), Send(peer, kept)])
