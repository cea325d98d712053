"""Random numbers as a function of what they are for: a key and an index, never a state.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11) turns a 128-bit
counter and a 64-bit key into four 32-bit words. The key is a hash of what the numbers are for (seed, parameter name,
step, layer, ...), the counter says which element. So any rank can make any slice, in any order, and nothing depends
on how many ranks there are or on what was drawn before.

The array expressions here define the numbers; `mpitrain.kernels.random` has the compiled loops that must equal them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpitrain.backend.namespace import Array
from mpitrain.errors import ShapeError

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def stream_key(*parts: int | str) -> int:
    """A 64-bit key from what the numbers are for, for instance ``stream_key(seed, "blocks.0.weight")``."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def philox(key: Any, low: Array, high: Array, xp: Any) -> tuple[Array, Array, Array, Array]:
    """Four uint64 arrays holding 32-bit words, for counters whose low and high 64 bits are given as uint64 arrays. The
    key is a number, or an array (1,) that has it.
    """
    mask = xp.uint64(MASK)
    shift = xp.uint64(32)
    c0, c1, c2, c3 = low & mask, low >> shift, high & mask, high >> shift
    key = xp.uint64(key) if isinstance(key, int) else key
    k0, k1 = key & mask, key >> shift
    for _ in range(ROUNDS):
        a = c0 * xp.uint64(MULTIPLIERS[0])
        b = c2 * xp.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = ((b >> shift) ^ c1 ^ k0, b & mask, (a >> shift) ^ c3 ^ k1, a & mask)
        k0, k1 = (k0 + xp.uint64(WEYL[0])) & mask, (k1 + xp.uint64(WEYL[1])) & mask
    return c0, c1, c2, c3


def words(key: Any, rows: Array, width: int, xp: Any) -> Array:
    """uint32 (R, width): word j of row r is word j%4 of Philox at counter (j//4, rows[r]); `rows` is uint64 (R,)."""
    blocks = (width + 3) // 4
    low = xp.arange(blocks, dtype=xp.uint64)[None, :] + xp.zeros((len(rows), 1), dtype=xp.uint64)
    high = rows.astype(xp.uint64)[:, None] + xp.zeros((1, blocks), dtype=xp.uint64)
    four = philox(key, low, high, xp)
    return xp.stack(four, axis=-1).reshape(len(rows), blocks * 4)[:, :width].astype(xp.uint32)


def words_at(key: Any, rows: Array, places: Array, xp: Any) -> Array:
    """uint32 of the shape of `places`: those words of the rows, which broadcast against them."""
    four = philox(key, places >> xp.uint64(2), rows.astype(xp.uint64) + xp.zeros_like(places), xp)
    lane, found = places & xp.uint64(3), four[0]
    for number in range(1, 4):
        found = xp.where(lane == number, four[number], found)
    return found.astype(xp.uint32)


class Scope:
    """What random numbers drawn during a forward pass are for: the seed, the step, and the samples in the batch.

    `samples` are the global row numbers of the batch's rows (uint64 (B,)), or None: rows are numbered from 0. `uses`
    counts how often each layer drew, so that a layer used twice gets two masks.
    """

    def __init__(self, seed: int = 0, step: int = 0, samples: Array | None = None, uses: dict[str, int] | None = None):
        self.seed, self.step, self.samples = seed, step, samples
        self.uses = uses if uses is not None else {}
        self.kept: dict[Any, Any] = {}            # arrays made for this batch, for all layers: not to be changed

    def copy(self) -> Scope:
        """A scope that draws the same numbers again later."""
        made = Scope(self.seed, self.step, self.samples, dict(self.uses))
        made.kept = self.kept
        return made

    def key(self, layer: str) -> Any:
        """The key for this use of `layer`: a number, and while a device captures, an array (1,) that will have it."""
        use = self.uses.get(layer, 0)
        self.uses[layer] = use + 1
        return stream_key(self.seed, self.step, layer, use)

    def rows(self, n: int, xp: Any) -> Array:
        """uint64 (n,): the row numbers for a batch whose first dim is n; n is a multiple of the number of samples.

        The array is kept for the next layer: not to be changed. On a device nothing goes up where samples are consecutive.
        """
        if self.samples is None or n == 0:
            return xp.arange(n, dtype=xp.uint64)
        if (n, xp) in self.kept:
            found: Array = self.kept[n, xp]
            return found
        each, rest = divmod(n, len(self.samples))
        if rest:
            raise ShapeError(f"random numbers for {n} rows, but the batch has {len(self.samples)} samples: the first dim "
                             "must be the batch, or a multiple of it")
        if xp is not np and follow(self.samples):
            first = int(self.samples[0]) * each
            made = xp.arange(first, first + n, dtype=xp.uint64)
        else:
            samples = xp.asarray(self.samples, dtype=xp.uint64)
            made = (samples[:, None] * xp.uint64(each) + xp.arange(each, dtype=xp.uint64)).reshape(n)
        self.kept[n, xp] = made
        return made


def follow(numbers: Any) -> bool:
    """Whether these are numbers of the host of which each is the one before and 1."""
    return type(numbers) is np.ndarray and numbers.dtype.kind in "iu" and bool((numbers[1:] - numbers[:-1] == 1).all())


class _Current(threading.local):
    def __init__(self) -> None:
        self.scope = Scope()


_current = _Current()


def current() -> Scope:
    """The scope of this thread: the trainer's while it runs a micro-batch, else one that counts uses from zero."""
    return _current.scope


@contextmanager
def use(scope: Scope) -> Iterator[None]:
    """Random numbers drawn inside belong to `scope`."""
    before, _current.scope = _current.scope, scope
    try:
        yield
    finally:
        _current.scope = before
