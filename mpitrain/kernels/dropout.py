"""Dropout: masks from Philox words, applied as they are made and kept as bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array, array_module
from mpitrain.backend.random import words_at
from mpitrain.kernels.kernel import Kernel
from mpitrain.kernels.library import CFunction, host
from mpitrain.kernels.random import random_words, signed

WORDS = 1 << 32                                   # The number of values of a word.


@dataclass(frozen=True)
class Dropping:
    """Dropout inside another kernel: a sample's numbers are dropped with probability p by its row of the stream `key`.

    `part`: these are not all of a sample's numbers but the part of this number, of parts of one size; or, with `firsts`, what
    stands for a sample here is a piece of one, with this first number.
    """

    rows: Array                                   # (B,) uint64
    key: Any                                      # a number; on a device also an array (1,) uint64 that has it
    p: float
    part: int = 0
    firsts: Array | None = None                   # (B,) uint64

    def factors(self, x: Array) -> Array:
        """The factor of each number of x (B, ...): 0, or 1 / (1 - p)."""
        xp = array_module(x)
        keep = self.words(x) >= round(self.p * WORDS)
        return xp.where(keep, x.dtype.type(self.scale), x.dtype.type(0))

    def words(self, x: Array) -> Array:
        """The stream's words, one for each number of x."""
        return _words(self.rows, self.key, x[0].size, self.first(x[0].size)).reshape(x.shape)

    def first(self, size: int) -> Any:
        """The place of the first of `size` numbers of each sample: one, or (B,) of them."""
        return self.part * size if self.firsts is None else self.firsts

    @property
    def scale(self) -> float:
        return 1 / (1 - self.p)

    def for_c(self, size: int) -> tuple[Array, int, int]:
        """(rows and then their first words, key, the least word that keeps), as C takes them; `size` numbers a sample."""
        return rows_and_first(self.rows, self.first(size)), signed(self.key), round(self.p * WORDS)

    def steps(self, queries: int, keys: int) -> tuple[int, int]:
        """The words of weights (B, H, queries, keys) that lie between two heads, and between two queries."""
        return queries * keys, keys


@dataclass(frozen=True)
class DroppingWindow(Dropping):
    """The same for weights (B, H, L, S) that are cut out of larger ones of `whole` queries and keys,
    from (head, query, key) `corner` on.
    """

    whole: tuple[int, int] = (0, 0)
    corner: tuple[int, int, int] = (0, 0, 0)

    def words(self, x: Array) -> Array:
        xp = array_module(x)
        heads, queries, keys = (xp.arange(first, first + n, dtype=xp.uint64) for first, n in zip(self.corner, x.shape[1:]))
        places = (heads[:, None] * xp.uint64(self.whole[0]) + queries)[..., None] * xp.uint64(self.whole[1]) + keys
        return words_at(self.key, self.rows[:, None, None, None], places + xp.zeros((len(x), 1, 1, 1), xp.uint64), xp)

    def first(self, size: int) -> int:
        head, query, key = self.corner
        return (head * self.whole[0] + query) * self.whole[1] + key

    def steps(self, queries: int, keys: int) -> tuple[int, int]:
        return self.whole[0] * self.whole[1], self.whole[1]


def rows_and_first(rows: Array, first: Any) -> Array:
    both = np.empty((2, len(rows)), np.uint64)
    both[0], both[1] = rows, first
    return both


def _words(rows: Array, key: int, width: int, first: Any) -> Array:
    """Words [first, first + width) of each row; `first` is one number, or one for each row."""
    if not isinstance(first, int):
        xp = array_module(rows)
        return words_at(key, rows[:, None], first[:, None] + xp.arange(width, dtype=xp.uint64), xp)
    made: Array = random_words(rows, key, first + width)
    return made[:, first:]


def _dropout(x: Array, rows: Array, key: int, p: float, added: Array | None, first: Any = 0) -> tuple[Array, Array]:
    keep = _words(rows, key, x.shape[1], first) >= round(p * WORDS)      # a word is below p * 2^32 with probability p
    y = _masked(x, keep, 1 / (1 - p))
    if added is not None:
        y += added
    return y, _packed(keep)


def _dropout_grad(grad: Array, bits: Array, p: float) -> Array:
    xp = array_module(grad)
    keep = (bits[:, :, None] >> xp.arange(8, dtype=xp.uint8)) & xp.uint8(1)
    return _masked(grad, keep.astype(bool).reshape(len(bits), 8 * bits.shape[1])[:, :grad.shape[1]], 1 / (1 - p))


def _masked(x: Array, keep: Array, scale: float) -> Array:
    result = array_module(x).where(keep, x, x.dtype.type(0))             # not x * keep: NaN times 0 is NaN
    result *= x.dtype.type(scale)
    return result


def _packed(keep: Array) -> Array:
    """8 to a byte, from the lowest bit on; each row from a byte of its own on."""
    xp = array_module(keep)
    height, width = keep.shape
    whole = xp.zeros((height, (width + 7) // 8, 8), xp.uint8)
    whole.reshape(height, -1 if width else 0)[:, :width] = keep
    return (whole << xp.arange(8, dtype=xp.uint8)).sum(axis=2, dtype=xp.uint8)


@host("random", "dropout", "X:hw L:2h X?:hw X!:hw B!:w/8h i i d ih iw")
def _dropout_host(call: CFunction, x: Array, rows: Array, key: int, p: float, added: Array | None,
                  first: Any = 0) -> tuple[Array, Array]:
    x = np.ascontiguousarray(x)
    y, bits = np.empty_like(x), np.empty((x.shape[0], (x.shape[1] + 7) // 8), np.uint8)
    call(x, rows_and_first(rows, first), None if added is None else np.ascontiguousarray(added), y, bits,
         signed(key), round(p * WORDS), 1 / (1 - p), *x.shape)
    return y, bits


@host("random", "dropout_grad", "X:hw B:w/8h X!:hw d ih iw")
def _dropout_grad_host(call: CFunction, grad: Array, bits: Array, p: float) -> Array:
    grad = np.ascontiguousarray(grad)
    result = np.empty_like(grad)
    call(grad, bits, result, 1 / (1 - p), *grad.shape)
    return result


dropout = Kernel("dropout", _dropout, _dropout_host, _dropout_host.loop("dropout"))
"""(y, bits) from (x (R, D), rows (R,) uint64, key, p, what is added to y or None, first = 0): word first + j of row r of the
stream `key` keeps or drops element j, where `first` is one number, or one for each row (uint64); what
is kept is divided by 1 - p. The bits (R, ceil(D / 8)) uint8 are for the gradient."""

dropout_grad = Kernel("dropout_grad", _dropout_grad, _dropout_grad_host, _dropout_grad_host.loop("dropout"))
"""The gradient of x from (grad (R, D), bits, p)."""
