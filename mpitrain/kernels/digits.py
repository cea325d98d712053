"""Blocks of 3, 5, 7, 9 or 11 levels and their residuals: digits of a number system, as many as 32 bits hold in a word.

    levels   3      5      7      9      11
    digits   20     13     11     10     9       of a word
    bits     1.60   2.46   2.91   3.20   3.56    an element

As in `kernels.compress`: to encode takes a = values + error (error may be None), writes what travels, and leaves a - (what
arrives) in `error`. A block's scale is its largest size / (levels // 2), and a / scale goes to the nearest whole number, ties to
even, to which levels // 2 is added to make a digit. Word w of a block's W has the elements w, w + W, w + 2 W, ..., the first one
as its lowest digit; where there is no such element, it has the digit of 0. Expressions of NumPy define the bits; native/digits.c
has the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from mpitrain.kernels.compress import Host, whole_numbers
from mpitrain.kernels.library import CFunction, host

DIGITS = {3: 20, 5: 13, 7: 11, 9: 10, 11: 9}     # of a word: levels ** digits <= 2 ** 32


def words_of(sizes: Host, levels: int) -> Host:
    """int64: words of blocks of so many elements."""
    found: Host = -(-sizes // DIGITS[levels])
    return found


def _places(bounds: Host, levels: int) -> tuple[Host, Host]:
    """Of each element its word, and which digit it is there."""
    sizes = np.diff(bounds)
    words = words_of(sizes, levels)
    place = np.arange(sizes.sum()) - np.repeat(bounds[:-1] - bounds[0], sizes)
    width = np.repeat(words, sizes)
    return np.repeat(np.cumsum(words) - words, sizes) + place % width, place // width


def _encode(values: Host, error: Host | None, bounds: Host, scales: Host, words: Host, levels: int) -> None:
    half = levels // 2
    q = whole_numbers(values, error, bounds, scales, half)
    word, digit = _places(bounds, levels)
    power = np.uint64(levels) ** np.arange(DIGITS[levels], dtype=np.uint64)
    total = np.full(len(words), half * power.sum(), np.int64)                 # of zeros
    np.add.at(total, word, q.astype(np.int64) * power.astype(np.int64)[digit])
    words[...] = total


def _decode(words: Host, bounds: Host, scales: Host, total: Host, levels: int, add: int) -> None:
    word, digit = _places(bounds, levels)
    power = np.uint64(levels) ** np.arange(DIGITS[levels], dtype=np.uint64)
    q = (words[word] // power[digit] % np.uint64(levels)).astype(np.float32) - np.float32(levels // 2)
    with np.errstate(over="ignore", invalid="ignore"):
        x = q * np.repeat(scales, np.diff(bounds))
        total[...] = total + x if add else x


def _encode_host(call: CFunction, values: Host, error: Host | None, bounds: Host, scales: Host, words: Host, levels: int) -> None:
    call(values, error, bounds, scales, words, len(values), len(scales), len(words), levels)


def _decode_host(call: CFunction, words: Host, bounds: Host, scales: Host, total: Host, levels: int, add: int) -> None:
    call(words, bounds, scales, total, len(total), len(scales), len(words), levels, add)


REFERENCE = {"digits_encode": _encode, "digits_decode": _decode}
SIGNATURES = {"digits_encode": "F:n F?!:n L:b+1 F!:b U!:w in ib iw i", "digits_decode": "U:w L:b+1 F:b F!:n in ib iw i i"}
_ARGUMENTS: dict[str, Any] = {"digits_encode": _encode_host, "digits_decode": _decode_host}


@cache
def version_of(name: str) -> Any:
    """C's function, or the expression, which are called alike."""
    return compiled(name) or REFERENCE[name]


def compiled(name: str) -> Any:
    """C's function, for the arguments of the expression; None without a compiler."""
    return host("digits", name, SIGNATURES[name], answers=True)(_ARGUMENTS[name])()
