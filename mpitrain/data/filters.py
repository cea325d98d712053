"""HDF5's filters, undone: what a stored chunk went through on its way into the file.

A function takes the bytes, the bytes of the whole chunk without filters, and those of an element. ValueError or zlib.error for
what the filter cannot have made.
"""

from __future__ import annotations

import zlib

import numpy as np


def gunzip(data: bytes, full: int, itemsize: int) -> bytes:
    """Undo HDF5's filter 1. Never more than one chunk (and a checksum) comes out, whatever the stream claims."""
    stream = zlib.decompressobj()
    out = stream.decompress(data, full + 4)
    if not stream.eof and len(out) < full:
        raise ValueError("the compressed bytes end too early")
    return out


def unshuffle(data: bytes, full: int, itemsize: int) -> bytes:
    """Undo HDF5's filter 2, which stores the first bytes of all elements, then the second bytes, and so on."""
    n = len(data) // itemsize
    body = np.frombuffer(data, np.uint8, n * itemsize).reshape(itemsize, n).T.tobytes()
    return body + data[n * itemsize:]


def check_fletcher32(data: bytes, full: int, itemsize: int) -> bytes:
    """Undo HDF5's filter 3: four bytes of checksum at the end, over big-endian 16-bit words."""
    body, stored = data[:-4], int.from_bytes(data[-4:], "little")
    if fletcher32(body) != stored:
        raise ValueError(f"fletcher32 {fletcher32(body):08x} is not {stored:08x} of the file")
    return body


def fletcher32(data: bytes) -> int:
    """Fletcher's checksum as HDF5 computes it (sums modulo 65535 where a nonzero multiple of 65535 stays 65535)."""
    words = np.frombuffer(data + b"\0" * (len(data) % 2), ">u2")
    first = second = 0
    for start in range(0, len(words), 1 << 20):          # The sums stay below 2**20 * 2**20 * 2**16 < 2**63.
        part = words[start:start + (1 << 20)].astype(np.int64)
        second += first * len(part) + int(part @ np.arange(len(part), 0, -1))
        first += int(part.sum())

    def fold(total: int) -> int:
        return (total - 1) % 65535 + 1 if total else 0
    return fold(second) << 16 | fold(first)


DECODE = {"gzip": gunzip, "shuffle": unshuffle, "fletcher32": check_fletcher32}
