"""Broadcast and all-to-all: collectives that add nothing up."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.schedules.steps import Copy, Receive, Round, ScheduleError, Send, inbox, part, rotating, without_empty


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


def equal_parts(n: int, length: int) -> None:
    """ScheduleError unless n equal parts make up the length: what two ranks exchange takes the same room on both."""
    if length % n:
        raise ScheduleError(f"all-to-all on {n} ranks needs {n} equal parts, and {length} elements do not divide by {n}; "
                            f"pad the array to {length + -length % n}")


@rotating
def direct_all_to_all(rank: int, n: int, length: int) -> Iterator[Round]:
    """All parts travel at once: one round, scratch for all of them."""
    equal_parts(n, length)
    others = [(rank + hop) % n for hop in range(1, n)]
    places = {peer: inbox(*part(peer, n, length)[1:]) for peer in others}
    yield without_empty([*(Receive(peer, places[peer]) for peer in reversed(others)),
                         *(Send(peer, part(peer, n, length)) for peer in others),
                         *(Copy(places[peer], part(peer, n, length)) for peer in others)])
