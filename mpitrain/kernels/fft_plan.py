"""What native/fft.c is told of a length: its radices, in one go or as a matrix, and all roots of unity, computed in float64."""

from __future__ import annotations

from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from mpitrain.backend import Array

LARGEST = 127                                     # prime factor; fft.c's
STEPS = 28                                        # fft.c's
LANES = 16                                        # numbers of a vector, at most
SIDE_BY_SIDE = 256                                # The longest lines that are not transformed as matrices.


class Plan(NamedTuple):
    numbers: Array                                # fft.c's Plan, as 64-bit integers
    tables: Array
    work: int                                     # bytes of working memory

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.tables.nbytes


def radices(n: int) -> list[int]:
    """Of the passes of a transform of length n, in order; with one above LARGEST where n has such a factor."""
    found, twos = [], (n & -n).bit_length() - 1
    n >>= twos
    fours = -twos % 3 if twos > 1 else 0
    found += [8] * ((twos - 2 * fours) // 3) + [4] * fours + [2] * (twos == 1)
    for r in range(3, LARGEST + 1, 2):
        while n % r == 0:
            found.append(r)
            n //= r
    return [*found, n] if n > 1 else found


@lru_cache(4096)
def suits(n: int) -> bool:
    return n > 0 and max(radices(n), default=1) <= LARGEST


def sides(n: int) -> tuple[int, int]:
    """(rows, columns) of the matrix that a line is: those that fill vectors best, or one row."""
    if n <= SIDE_BY_SIDE:
        return 1, n
    divisors = [d for d in range(2, int(n ** 0.5) + 1) if n % d == 0]
    pairs = [pair for d in divisors for pair in ((d, n // d), (n // d, d))]
    return min(pairs, key=lambda p: (-(-p[0] // LANES) * LANES * p[1] + -(-p[1] // LANES) * LANES * p[0]) * max(1, max(p) / 512),
               default=(1, n))


def roots(n: int, powers: Array) -> tuple[Array, Array]:
    """Cosines and sines of 2 pi p / n, by those of angles up to pi / 4: exact where they are 0 or 1."""
    eighth = 8 * (powers % n)
    octant, rest = eighth // n, eighth % n
    angle = (np.where(octant % 2, n - rest, rest) / n) * (np.pi / 4)
    c, s = np.cos(angle), np.sin(angle)
    c, s = np.where((octant + 1) // 2 % 2, s, c), np.where((octant + 1) // 2 % 2, c, s)
    return np.where((octant + 2) // 4 % 2, -c, c), np.where(octant >= 4, -s, s)


def _steps(n: int, tables: list[Array]) -> list[int]:
    """fft.c's Steps; what they need is added to the tables."""
    found, m = [], n
    for r in radices(n):
        m //= r
        p, k = np.arange(1, m)[:, None], np.arange(1, r)
        c, s = roots(m * r, p * k)
        found += [r, sum(map(len, tables)), 0]
        tables.append(np.stack([c, -s], -1).ravel())
        if r % 2:
            found[-1] = sum(map(len, tables))
            tables.extend(roots(r, np.arange(r)))
    return [n, len(found) // 3, *found, *[0] * (3 * STEPS - len(found))]


MOST_KEPT = 64 << 20                              # bytes of plans kept, and the last one whatever its size
_kept: dict[tuple[int, bool, Any], Plan] = {}     # the last used one at the end
_one_at_a_time = Lock()


def plan(n: int, halves: bool, dtype: Any) -> Plan:
    """For lines of n numbers of the dtype: complex ones, or real ones and their `halves`."""
    key = n, halves, dtype
    with _one_at_a_time:
        found = _kept.pop(key, None) or _plan(n, halves, dtype)
        _kept[key] = found
        while len(_kept) > 1 and sum(kept.nbytes for kept in _kept.values()) > MOST_KEPT:
            del _kept[next(iter(_kept))]
    return found


def _plan(n: int, halves: bool, dtype: Any) -> Plan:
    length = n // 2 if halves and n % 2 == 0 else n
    n1, n2 = sides(length)
    padded = -(-n2 // LANES) * LANES
    tables: list[Array] = []
    columns, rows = _steps(n1, tables), _steps(n2, tables)
    middle = sum(map(len, tables))
    if n1 > 1:
        factors = np.zeros((n1, 2, padded))
        c, s = roots(length, np.arange(n1)[:, None] * np.arange(n2))
        factors[:, 0, :n2], factors[:, 1, :n2] = c, -s
        tables.append(factors.ravel())
    joining = sum(map(len, tables))
    if halves:
        c, s = roots(n, np.arange(n // 4 + 1))
        tables += [-s, -c]
    numbers = np.array([length, padded, middle, joining, *columns, *rows], np.int64)
    work = 4 * LANES * (max(n1, n2) + 1) + 2 * (n1 + LANES) * padded + 4 * (length + 1) + 2
    return Plan(numbers, np.concatenate([*tables, np.zeros(1)]).astype(dtype), work * np.dtype(dtype).itemsize)
