"""Users' all-reduces that are wrong in one element of longer arrays: one says so when asked, the other only when it matters."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.schedules.collectives import recursive_doubling
from mpitrain.schedules.steps import Copy, Round, data

RIGHT = 100


asked: set[tuple[int, int]] = set()


def loses_a_part(rank: int, n: int, length: int) -> Iterator[Round]:
    yield from recursive_doubling(rank, n, length)
    if length > RIGHT:
        yield [Copy(data(0, 1), data(length - 1, length))]


def another_the_second_time(rank: int, n: int, length: int) -> Iterator[Round]:
    """No function of its arguments: each rank's rounds are right when they are proved, and lose a part when they run."""
    known = length > RIGHT and (rank, length) in asked
    asked.add((rank, length))
    return loses_a_part(rank, n, length) if known else recursive_doubling(rank, n, length)
