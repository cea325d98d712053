"""Secrets in n shares of which any t tell it and any t - 1 tell nothing (Shamir, 1979).

A secret is the value at 0 of a random polynomial of degree t - 1 over the integers modulo the prime 2^521 - 1; share x is its
value at x = 1, 2, ...
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

PRIME = (1 << 521) - 1
SHARE_BYTES = 66


def split(secret: int, places: Iterable[int], threshold: int) -> dict[int, int]:
    """A share for each of the `places`, numbers from 1 on."""
    assert 0 <= secret < PRIME and threshold >= 1
    coefficients = [secret, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: _value(coefficients, x) for x in places}


def _value(coefficients: list[int], x: int) -> int:
    assert 0 < x < PRIME, "the value at 0 is the secret"
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * x + coefficient) % PRIME
    return total


def join(shares: Mapping[int, int]) -> int:
    """The secret of as many shares as the threshold, or more; of fewer, a number that has nothing to do with it."""
    total = 0
    for x, share in shares.items():
        above, below = 1, 1                                   # Lagrange's polynomial of x, at 0
        for other in shares:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        total += share * above * pow(below, -1, PRIME)
    return total % PRIME
