"""The k smallest of numbers that lie on several ranks, exactly, and the same ones on every rank.

Numbers are compared by their bits: of floats of one sign, the larger has the larger bits. A radix select looks at 11 bits a
round, from the top: each rank counts its numbers by these bits, the counts are added up (whole numbers: exact in any order), and
the digit in which the k-th one lies is known to all. So no rank sees the others' numbers, and 6 tables of 16 kB do for 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

DIGIT = 11                                       # bits
Add = Callable[[np.ndarray[Any, Any]], None]     # replaces a flat array of int64 by its sum over ranks


class Smallest(NamedTuple):
    """For each group: the k-th smallest key, how many equal keys are among the k smallest, and how many there are."""

    threshold: np.ndarray[Any, Any]
    taken: np.ndarray[Any, Any]
    equal: np.ndarray[Any, Any]


def magnitude_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bits of |values|, as unsigned numbers in the same order; NaN is the largest."""
    kind = np.dtype(f"u{values.itemsize}")
    bits: np.ndarray[Any, Any] = values.view(kind) & kind.type(np.iinfo(kind).max >> 1)
    return bits


def smallest(keys: Sequence[Iterable[np.ndarray[Any, Any]]], k: Sequence[int], bits: int, add: Add) -> Smallest:
    """The k[g] smallest keys of each group g; `keys[g]` are this rank's, unsigned, each counted by one rank. It communicates."""
    n, held = len(k), [list(arrays) for arrays in keys]
    threshold, rest = np.zeros(n, np.uint64), np.asarray(k, np.int64).copy()
    equal = np.zeros(n, np.int64)
    for level in reversed(range(-(-bits // DIGIT))):
        table = np.zeros((n, 1 << DIGIT), np.int64)
        for g, arrays in enumerate(held):
            for array in arrays:
                digits = array >> array.dtype.type(level * DIGIT)
                inside = digits[digits >> array.dtype.type(DIGIT) == array.dtype.type(threshold[g])]
                table[g] += np.bincount((inside & array.dtype.type((1 << DIGIT) - 1)).astype(np.intp), minlength=1 << DIGIT)
        add(table.reshape(-1))
        up_to = np.cumsum(table, axis=1)
        digit = np.minimum((up_to < rest[:, None]).sum(axis=1), (1 << DIGIT) - 1)
        equal = table[np.arange(n), digit]
        rest -= up_to[np.arange(n), digit] - equal
        threshold = threshold << np.uint64(DIGIT) | digit.astype(np.uint64)
    return Smallest(threshold, rest, equal)
