"""A user's all-reduce that is right for the small lengths tried at start-up and wrong in one element beyond."""

from __future__ import annotations

from collections.abc import Iterator

from mpitrain.schedules.collectives import recursive_doubling
from mpitrain.schedules.steps import Copy, Round, data

RIGHT = 100


def loses_a_part(rank: int, n: int, length: int) -> Iterator[Round]:
    yield from recursive_doubling(rank, n, length)
    if length > RIGHT:
        yield [Copy(data(0, 1), data(length - 1, length))]
