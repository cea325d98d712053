"""Blocks of few bits and their residuals: what compressed gradients are made of, one pass over memory each.

An array of n float32 has blocks: `bounds` is int64 (b + 1), the positions where they begin and the end, counted from anywhere.
To encode takes a = values + error (error may be None), writes what travels, and leaves a - (what arrives) in `error`; `values`
stays. A block with a number that is not finite, or so large that a scale times a whole number might not be, has the scale NaN,
and its error stays as it was. Expressions of NumPy define the bits; native/compress.c has the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np

from mpitrain.kernels.library import CFunction, host
from mpitrain.kernels.wire import pack_bfloat16, unpack_bfloat16

Host: TypeAlias = np.ndarray[Any, Any]
LANES = 32                                       # partial sums of a block
TINY = np.float32(2.0 ** -100)                   # scales below count as 0: 1 / scale might overflow
HUGE = np.uint32(0x7F000000)                     # 2^127 as bits: 127 scales might overflow from there on
SUMS = np.uint32(0x7B000000)                     # 2^119: a sum of 256 numbers might overflow from there on
ROUNDS_UP = np.uint32(0x7F7F8000)                # bfloat16 has infinity from there on
TURNS = 4                                        # of Lloyd's algorithm
SIZE = np.uint32(0x7FFFFFFF)                     # the bits of abs(x)
NAN = np.float32(np.nan)


def sum_of(values: Host, error: Host | None) -> Host:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.copy() if error is None else values + error


def bits_of_size(a: Host) -> Host:
    return a.view(np.uint32) & SIZE


def top_of(a: Host, starts: Host) -> Host:
    """The largest size in each block, as bits."""
    return np.maximum.reduceat(bits_of_size(a), starts) if len(starts) else np.zeros(0, np.uint32)


def keep(error: Host | None, rest: Host, finite: Host) -> None:
    """Writes `rest` to where blocks are finite."""
    if error is not None:
        np.copyto(error, rest, where=finite)


def whole_numbers(values: Host, error: Host | None, bounds: Host, scales: Host, most: int, words: Host | None = None) -> Host:
    """Whole numbers -most .. most of the size of values: the nearest, whose residual is exact (Sterbenz), or with `words`
    (uint32) up or down by chance, so that the mean is right."""
    starts, sizes = bounds[:-1] - bounds[0], np.diff(bounds)
    a = sum_of(values, error)
    top = top_of(a, starts)
    finite = top < HUGE
    scale = np.where(finite, top, np.uint32(0)).view(np.float32) / np.float32(most)
    zero = scale < TINY
    scales[...] = np.where(finite, np.where(zero, np.float32(0), scale), NAN)
    inverse = np.where(zero, np.float32(0), np.float32(1) / np.where(zero, np.float32(1), scale))
    known = np.repeat(finite, sizes)
    exact = np.where(known, a, np.float32(0)) * np.repeat(inverse, sizes)
    near = np.rint(exact) if words is None else np.floor(exact + (words >> 8).astype(np.float32) * np.float32(2.0 ** -24))
    q = np.clip(near, -most, most).astype(np.int8)
    with np.errstate(invalid="ignore"):
        keep(error, a - q.astype(np.float32) * np.repeat(np.where(zero, np.float32(0), scale), sizes), known)
    return q


def _decoded(q: Host, bounds: Host, scales: Host, total: Host, add: int) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        x = q.astype(np.float32) * np.repeat(scales, np.diff(bounds))
        total[...] = total + x if add else x


def _int8_encode(values: Host, error: Host | None, bounds: Host, scales: Host, q: Host) -> None:
    q[...] = whole_numbers(values, error, bounds, scales, 127).view(np.uint8)


def _int8_draw(values: Host, error: Host | None, bounds: Host, words: Host, scales: Host, q: Host) -> None:
    q[...] = whole_numbers(values, error, bounds, scales, 127, words).view(np.uint8)


def _int8_decode(q: Host, bounds: Host, scales: Host, total: Host, add: int) -> None:
    _decoded(q.view(np.int8), bounds, scales, total, add)


def _nibbles(bounds: Host) -> tuple[Host, Host]:
    """Which byte each number is in, and whether in its upper half: a block's first half lies in the lower halves."""
    sizes = np.diff(bounds)
    halves = (sizes + 1) // 2
    place = np.arange(sizes.sum()) - np.repeat(bounds[:-1] - bounds[0], sizes)
    half = np.repeat(halves, sizes)
    upper = place >= half
    return np.repeat(np.cumsum(halves) - halves, sizes) + place - upper * half, upper


def _int4_encode(values: Host, error: Host | None, bounds: Host, scales: Host, q: Host) -> None:
    numbers = (whole_numbers(values, error, bounds, scales, 7) + 8).astype(np.uint8)
    byte, upper = _nibbles(bounds)
    q[...] = 0x80                                 # where a block is of odd length, the last upper half is a zero
    q[byte[~upper]] |= numbers[~upper]
    q[byte[upper]] = q[byte[upper]] & 0x0F | numbers[upper] << 4


def _int4_decode(q: Host, bounds: Host, scales: Host, total: Host, add: int) -> None:
    byte, upper = _nibbles(bounds)
    _decoded((q[byte] >> (4 * upper).astype(np.uint8) & 0x0F).astype(np.int8) - np.int8(8), bounds, scales, total, add)


def _in_rows(x: Host, sizes: Host, width: int) -> tuple[Host, Host]:
    """Blocks as rows of `width`, padded with zeros; and which numbers are there."""
    there = np.arange(width) < sizes[:, None]
    rows = np.zeros((len(sizes), width), x.dtype)
    rows[there] = x
    return rows, there


def _lanes(rows: Host) -> Host:
    """(b,): sums of rows of whole LANES. Lane l has the numbers l, l + LANES, ... in order; lanes are folded in halves."""
    lanes = np.zeros((len(rows), LANES), np.float32)
    for i in range(0, rows.shape[1], LANES):
        lanes += rows[:, i:i + LANES]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _packed(below: Host, sizes: Host) -> Host:
    """Bits of blocks that begin at whole bytes, the first one lowest."""
    rows, _ = _in_rows(below, sizes, -(-int(sizes.max(initial=1)) // 8) * 8)
    there = np.arange(rows.shape[1] // 8) < ((sizes + 7) // 8)[:, None]
    return np.packbits(rows, axis=1, bitorder="little")[there]


def _two_of(q: Host, bounds: Host, low: Host, high: Host, total: Host, add: int) -> None:
    sizes = np.diff(bounds)
    first = np.cumsum((sizes + 7) // 8) - (sizes + 7) // 8
    place = np.arange(sizes.sum()) - np.repeat(bounds[:-1] - bounds[0], sizes)
    below = q[np.repeat(first, sizes) + place // 8] >> (place % 8).astype(np.uint8) & 1
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.where(below, np.repeat(low, sizes), np.repeat(high, sizes))
        total[...] = total + x if add else x


def _onebit_encode(values: Host, error: Host | None, bounds: Host, scales: Host, q: Host) -> None:
    sizes = np.diff(bounds)
    a = sum_of(values, error)
    rows, _ = _in_rows(a, sizes, -(-int(sizes.max(initial=1)) // LANES) * LANES)
    with np.errstate(over="ignore", invalid="ignore"):
        total = _lanes(np.abs(rows))
    finite = total < np.inf
    scale = np.where(finite, total, np.float32(0)) / np.maximum(sizes, 1).astype(np.float32)
    scales[...] = np.where(finite, scale, NAN)
    with np.errstate(invalid="ignore"):
        below, each = a < 0, np.repeat(scale, sizes)
        keep(error, a - np.where(below, -each, each), np.repeat(finite, sizes))
    q[...] = _packed(below, sizes)


def _onebit_decode(q: Host, bounds: Host, scales: Host, total: Host, add: int) -> None:
    _two_of(q, bounds, -scales, scales, total, add)


def _twomeans_encode(values: Host, error: Host | None, bounds: Host, means: Host, q: Host) -> None:
    """Lloyd's algorithm (1957/1982) from the smallest and the largest number: the bound lies between two values, which become the
    means of both sides. A side without numbers has the other one's."""
    sizes = np.diff(bounds)
    a = sum_of(values, error)
    finite = top_of(a, bounds[:-1] - bounds[0]) < SUMS
    known = np.repeat(finite, sizes)
    rows, there = _in_rows(np.where(known, a, np.float32(0)), sizes, -(-int(sizes.max(initial=1)) // LANES) * LANES)
    low, high = rows.min(axis=1, where=there, initial=np.inf), rows.max(axis=1, where=there, initial=-np.inf)
    bound = np.zeros(len(sizes), np.float32)
    for _ in range(TURNS):
        bound = (low + high) * np.float32(0.5)
        below = (rows < bound[:, None]) & there
        count = below.sum(axis=1)
        lows, highs = _lanes(np.where(below, rows, np.float32(0))), _lanes(np.where(below, np.float32(0), rows))
        of_highs = highs / np.maximum(sizes - count, 1).astype(np.float32)
        low = np.where(count > 0, lows / np.maximum(count, 1).astype(np.float32), of_highs)
        high = np.where(count < sizes, of_highs, low)
    means[0::2], means[1::2] = np.where(finite, low, NAN), np.where(finite, high, NAN)
    with np.errstate(invalid="ignore"):
        under = (a < np.repeat(bound, sizes)) & known
        keep(error, a - np.where(under, np.repeat(low, sizes), np.repeat(high, sizes)), known)
    q[...] = _packed(under, sizes)


def _twomeans_decode(q: Host, bounds: Host, means: Host, total: Host, add: int) -> None:
    _two_of(q, bounds, means[0::2], means[1::2], total, add)


def _topk_encode(values: Host, error: Host | None, bounds: Host, counts: Host, sent: Host, places: Host) -> None:
    """Of block i the counts[i] largest in size as bfloat16, in the order of their places there; of equal ones the first. What
    rounding leaves is exact."""
    starts, sizes, a = bounds[:-1] - bounds[0], np.diff(bounds), sum_of(values, error)
    size, rest, at = bits_of_size(a).astype(np.int64), a.copy(), 0
    for start, length, count in zip(starts, sizes, counts):
        key = size[start:start + length] << 32 | (length - 1 - np.arange(length))
        chosen = np.sort(np.argpartition(key, length - count)[length - count:]) if count < length else np.arange(length)
        near = np.empty(count, np.float32)
        pack_bfloat16(a[start + chosen], sent[at:at + count])
        unpack_bfloat16(sent[at:at + count], near)
        places[at:at + count] = chosen
        with np.errstate(over="ignore", invalid="ignore"):
            rest[start + chosen] -= near
        at += int(count)
    keep(error, rest, np.repeat(top_of(a, starts) < ROUNDS_UP, sizes))


def _topk_add(sent: Host, places: Host, bounds: Host, counts: Host, total: Host) -> None:
    """Adds what travelled to `total`. No place occurs twice."""
    with np.errstate(over="ignore", invalid="ignore"):
        near = np.empty(len(sent), np.float32)
        unpack_bfloat16(sent, near)
        total[np.repeat(bounds[:-1] - bounds[0], counts) + places] += near


REFERENCE = {"int8_encode": _int8_encode, "int8_draw": _int8_draw, "int8_decode": _int8_decode,
             "int4_encode": _int4_encode, "int4_decode": _int4_decode,
             "onebit_encode": _onebit_encode, "onebit_decode": _onebit_decode,
             "twomeans_encode": _twomeans_encode, "twomeans_decode": _twomeans_decode,
             "topk_encode": _topk_encode, "topk_add": _topk_add}
ENCODE, DECODE = "F:n F?!:n L:b+1 F!:b B!:q in ib iq", "B:q L:b+1 F:b F!:n in ib iq i"
SIGNATURES = {"int8_encode": "F:n F?!:n L:b+1 F!:b B!:n in ib", "int8_decode": "B:n L:b+1 F:b F!:n in ib i",
              "int8_draw": "F:n F?!:n L:b+1 U:n F!:b B!:n in ib",
              "int4_encode": ENCODE, "int4_decode": DECODE, "onebit_encode": ENCODE, "onebit_decode": DECODE,
              "twomeans_encode": "F:n F?!:n L:b+1 F!:b2 B!:q in ib iq", "twomeans_decode": "B:q L:b+1 F:b2 F!:n in ib iq i",
              "topk_encode": "F:n F?!:n L:b+1 L:b H!:k H!:k in ib ik", "topk_add": "H:k H:k L:b+1 L:b F!:n in ib ik"}


@cache
def version_of(name: str) -> Any:
    """C's function, or the expression, which are called alike."""
    return compiled(name) or REFERENCE[name]


def compiled(name: str) -> Any:
    """C's function, for the arguments of the expression; None without a compiler."""
    body: Any = _ARGUMENTS[name]
    library = "compress_bits" if name.startswith(("onebit", "twomeans")) else "compress"
    return host(library, name, SIGNATURES[name], answers=True)(body)()


def _int8_encode_host(call: CFunction, values: Host, error: Host | None, bounds: Host, scales: Host, q: Host) -> None:
    call(values, error, bounds, scales, q, len(values), len(scales))


def _int8_draw_host(call: CFunction, values: Host, error: Host | None, bounds: Host, words: Host, scales: Host, q: Host) -> None:
    call(values, error, bounds, words, scales, q, len(values), len(scales))


def _encode_host(call: CFunction, values: Host, error: Host | None, bounds: Host, scales: Host, q: Host) -> None:
    call(values, error, bounds, scales, q, len(values), len(bounds) - 1, len(q))


def _int8_decode_host(call: CFunction, q: Host, bounds: Host, scales: Host, total: Host, add: int) -> None:
    call(q, bounds, scales, total, len(total), len(scales), add)


def _decode_host(call: CFunction, q: Host, bounds: Host, scales: Host, total: Host, add: int) -> None:
    call(q, bounds, scales, total, len(total), len(bounds) - 1, len(q), add)


def _topk_encode_host(call: CFunction, values: Host, error: Host | None, bounds: Host, counts: Host, sent: Host, places: Host
                      ) -> None:
    call(values, error, bounds, counts, sent, places, len(values), len(counts), len(sent))


def _topk_add_host(call: CFunction, sent: Host, places: Host, bounds: Host, counts: Host, total: Host) -> None:
    call(sent, places, bounds, counts, total, len(total), len(counts), len(sent))


_ARGUMENTS: dict[str, Any] = {"int8_encode": _int8_encode_host, "int8_draw": _int8_draw_host,
                               "int8_decode": _int8_decode_host, "int4_encode": _encode_host,
              "int4_decode": _decode_host, "onebit_encode": _encode_host, "onebit_decode": _decode_host,
              "twomeans_encode": _encode_host, "twomeans_decode": _decode_host,
              "topk_encode": _topk_encode_host, "topk_add": _topk_add_host}
