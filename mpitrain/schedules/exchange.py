"""Broadcast and all-to-all: collectives that add nothing up."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.schedules.ring import ring_all_gather
from mpitrain.schedules.steps import Copy, Receive, Round, ScheduleError, Send, inbox, moved, part, parts, rotating, without_empty


def binomial_broadcast(rank: int, n: int, length: int, root: int = 0) -> Iterator[Round]:
    """Whoever has the data hands it to a rank half the remaining distance away: log2(n) rounds, for small arrays.

        n = 8, root 0:   0 -> 4   |   0 -> 2, 4 -> 6   |   0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7
    """
    place, everything = (rank - root) % n, part(0, 1, length)
    distance = 1 << (n - 1).bit_length() >> 1
    while distance:
        if place % (2 * distance) == 0 and place + distance < n:
            yield without_empty([Send((rank + distance) % n, everything)])
        elif place % (2 * distance) == distance:
            yield without_empty([Receive((rank - distance) % n, everything)])
        distance //= 2


def scatter_broadcast(rank: int, n: int, length: int, root: int = 0) -> Iterator[Round]:
    """The root's parts are scattered by halves, then travel around the ring: twice the data at most, for large arrays.

        n = 4, root 0:   0 -> 2: parts 2, 3   |   0 -> 1: part 1, 2 -> 3: part 3   |   ring
    """
    ranks = [(root + place) % n for place in range(n)]
    place = (rank - root) % n
    yield from moved(scatter(place, n, length), ranks=ranks)
    yield from moved(ring_all_gather(place, n, length), ranks=ranks)


def scatter(rank: int, n: int, length: int) -> Iterator[Round]:
    """Rank 0's part i goes to rank i: the first of some ranks hands the first of their second half what that half needs."""
    low, high = 0, n
    while high - low > 1:
        middle = (low + high + 1) // 2
        needed = parts(middle, high, n, length)
        if rank == low:
            yield without_empty([Send(middle, needed)])
        elif rank == middle:
            yield without_empty([Receive(low, needed)])
        low, high = (low, middle) if rank < middle else (middle, high)


def equal_parts(n: int, length: int) -> None:
    """ScheduleError unless n equal parts make up the length: what two ranks exchange takes the same room on both."""
    if length % n:
        raise ScheduleError(f"all-to-all on {n} ranks needs {n} equal parts, and {length} elements do not divide by {n}; "
                            f"pad the array to {length + -length % n}")


def pairwise_all_to_all(rank: int, n: int, length: int) -> Iterator[Round]:
    """In round k the ranks whose sum is k modulo n swap their parts for each other: n rounds, scratch for one part.

        n = 4:   1 <-> 3   |   0 <-> 1, 2 <-> 3   |   0 <-> 2   |   0 <-> 3, 1 <-> 2
    """
    equal_parts(n, length)
    for total in range(n):
        peer = (total - rank) % n
        if peer != rank:
            swapped = part(peer, n, length)
            arrived = inbox(0, swapped.length)
            yield without_empty([Receive(peer, arrived), Send(peer, swapped), Copy(arrived, swapped)])


@rotating
def direct_all_to_all(rank: int, n: int, length: int) -> Iterator[Round]:
    """All parts travel at once: one round, scratch for all of them."""
    equal_parts(n, length)
    others = [(rank + hop) % n for hop in range(1, n)]
    places = {peer: inbox(*part(peer, n, length)[1:]) for peer in others}
    yield without_empty([*(Receive(peer, places[peer]) for peer in reversed(others)),
                         *(Send(peer, part(peer, n, length)) for peer in others),
                         *(Copy(places[peer], part(peer, n, length)) for peer in others)])
