"""Self-attention of samples whose positions are cut over ranks: keys and values go round the ring of these ranks.

    step        0           1           2              each rank's queries stay; the next keys and values travel
    rank 0      k0 v0       k2 v2       k1 v1          while it computes with those that it has
    rank 1      k1 v1       k0 v0       k2 v2
    rank 2      k2 v2       k1 v1       k0 v0

After Liu, Zaharia, Abbeel: "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023. The results of the steps
are joined by the largest scores and sums of their softmaxes, so no rank has more than a few ranks' keys at a time. Backward goes
round once more, and the gradients of keys and values travel behind them, from rank to rank, and home in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.autograd import Context, Function, Tensor
from mpitrain.backend import Array, array_module
from mpitrain.backend.random import current
from mpitrain.comm.messages.link import Link, Message
from mpitrain.errors import ConfigError
from mpitrain.kernels.dropout import DroppingWindow
from mpitrain.kernels.flash_attention import join_attention
from mpitrain.ops.attention import flash_kernels
from mpitrain.placement.zigzag import chunks, tiles

KEYS, GRADIENTS = range(2)                                    # Tags of messages.
SUMS = "gradients of keys and values"
AT_ONCE = 1 << 18                                             # Messages are looked at after so many scores, about a millisecond.
Known = tuple[Array, Array]                                   # The tops and inverses of queries.


class Ring:
    """The ranks that share samples, with positions by `zigzag`. Collective; all layers use the same memory in turn."""

    def __init__(self, link: Link):
        self.link, self.rank, self.size = link, link.rank, link.size
        self._rooms: dict[tuple[str, Any], Array] = {}

    def room(self, name: str, shape: tuple[int, ...], dtype: Any, xp: Any = np) -> Array:
        """Memory of that name, which is used again where the shape is the same."""
        found = self._rooms.get((name, xp))
        if found is None or found.shape != shape or found.dtype != dtype:
            found = self._rooms[name, xp] = xp.empty(shape, dtype)
        return found

    def go_round(self, own: Array) -> Iterator[tuple[int, Array]]:
        """(rank, that rank's array), this rank's first; while the caller works, the array goes on and the next one comes."""
        xp, held = array_module(own), own
        for step in range(self.size):
            last, what = step == self.size - 1, "keys and values"
            if not last:
                room = self.room(f"{what} {step % 2}", own.shape, own.dtype)
                arriving, leaving = self.receive(room, KEYS, what), self.send(held, KEYS, what)
            yield (self.rank - step) % self.size, held
            if not last:
                arriving.wait()
                leaving.wait()                                # Its memory is received into next.
                held = xp.asarray(arriving.array)

    def receive(self, into: Array, tag: int, what: str) -> Message:
        """Begins to receive from the rank before."""
        return self.link.receive(into.shape, into.dtype, (self.rank - 1) % self.size, tag, what, into=into)

    def send(self, array: Array, tag: int, what: str) -> Message:
        """Begins to send to the next rank."""
        return self.link.send(array, (self.rank + 1) % self.size, tag, what)

    def progress(self) -> None:
        """Looks after the messages that are on their way."""
        self.link.progress.progress()


class LoneRing(Ring):
    """The ring of a rank that is by itself: the keys and values of the others are zeros."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._rooms = {}

    def receive(self, into: Array, tag: int, what: str) -> Any:
        into.fill(0)
        return SimpleNamespace(array=into, wait=lambda: None)

    def send(self, array: Array, tag: int, what: str) -> Any:
        return SimpleNamespace(wait=lambda: None)

    def progress(self) -> None:
        """There are no messages."""


class Travelling:
    """Sums that follow the arrays of `go_round`: each rank adds its part to what the rank before it had, and sends them on."""

    def __init__(self, ring: Ring, shape: tuple[int, ...], dtype: Any, xp: Any):
        self.ring, self.shape, self.dtype, self.xp = ring, shape, dtype, xp
        self._turn = 0
        self._arriving: Message | None = None
        self._leaving: Message | None = None

    def begin(self) -> Array:
        """Memory for this rank's part of the next sums."""
        name = f"{SUMS} 0" if self._arriving is None else "part of sums"      # The first sum is sent from where it is made.
        return self.ring.room(name, self.shape, self.dtype, self.xp)

    def pass_on(self, mine: Array, touched: list[Any]) -> None:
        """Adds `mine`, from `begin`, to the sums and sends them on. Only its parts `touched` hold values; of the first, all."""
        total = mine
        if self._arriving is not None:
            total = self._arrived()
            for place in touched:
                total[place] += mine[place]
        if self._leaving is not None:
            self._leaving.wait()
        self._turn = 1 - self._turn
        self._arriving = self.ring.receive(self.ring.room(f"{SUMS} {self._turn}", self.shape, self.dtype), GRADIENTS, SUMS)
        self._leaving = self.ring.send(total, GRADIENTS, SUMS)

    def home(self) -> Array:
        """The sums of this rank's own arrays, which have been everywhere."""
        total = self._arrived()
        assert self._leaving is not None
        self._leaving.wait()
        return total

    def _arrived(self) -> Array:
        assert self._arriving is not None
        self._arriving.wait()
        return self.xp.asarray(self._arriving.array)


def ring_attention(qkv: Any, heads: int, *, ring: Ring, causal: bool = False, scale: float | None = None, dropout: float = 0.0,
                   layer: str = "", part: int = 0, operands: str = "") -> Tensor:
    """`ops.self_attention` of whole samples, (B, L, H * D) for the positions that are here from their qkv (B, L, 3 * H * D).

    Dropout is that of one rank with all positions.
    """
    if not 0 <= dropout < 1:
        raise ConfigError(f"ring_attention: dropout is {dropout}, expected at least 0 and less than 1")
    width = qkv.shape[2] // (3 * heads)
    return RingAttention.apply(qkv, ring=ring, heads=heads, causal=causal, dropout=dropout, part=part, operands=operands,
                               scale=width ** -0.5 if scale is None else scale, key=current().key(layer) if dropout else 0)


class RingAttention(Function):
    """Attention that keeps arrays of this rank's positions alone for backward, nothing of other ranks."""

    floats = 4

    @staticmethod
    def forward(ctx: Context, qkv: Array, *, ring: Ring, heads: int, causal: bool, scale: float, dropout: float, key: int,
                part: int, operands: str = "") -> Array:
        batch, length, width = qkv.shape
        xp, size = ctx.xp, length // 2
        ctx.work = work = _Work(ring, heads, causal, scale, size, part * heads,
                                (current().rows(batch, xp), key, dropout) if dropout else None,
                                flash_kernels(operands, qkv))
        out = xp.empty((batch, length, width // 3), qkv.dtype)
        outs, queries = _heads(out, heads, 1)[0], _heads(qkv, heads, 3)[0]
        known: list[Known | None] = [None, None]
        for source, kv in ring.go_round(_keys(ring, qkv)):
            k, v = _heads(kv, heads, 2)
            for i, j, diagonal in tiles(ring.rank, source, ring.size, causal):
                mine, theirs = _half(i, size), _half(j, size)
                before, target = known[i], outs[mine]
                if before is not None:
                    target = ring.room("tile", target.shape, target.dtype, xp)
                found = work.forward(queries[mine], k[theirs], v[theirs], target, source, i, j, diagonal)
                if before is None:
                    known[i] = found
                else:
                    join_attention(outs[mine], *before, target, *found)
        ctx.save(qkv, out, *(array for pair in known if pair is not None for array in pair))
        return out

    @staticmethod
    def backward(ctx: Context, grad: Array) -> Array:
        qkv, out, *known = ctx.saved
        work: _Work = ctx.work
        ring, heads, size, xp = work.ring, work.heads, work.size, ctx.xp
        result = xp.empty(qkv.shape, qkv.dtype)
        q, o, g, dq = _heads(qkv, heads, 3)[0], _heads(out, heads, 1)[0], _heads(grad, heads, 1)[0], _heads(result, heads, 3)[0]
        own = _keys(ring, qkv)
        sums, started = Travelling(ring, own.shape, own.dtype, xp), [False, False]
        for source, kv in ring.go_round(own):
            k, v = _heads(kv, heads, 2)
            mine = sums.begin()
            dk, dv = _heads(mine, heads, 2)
            touched = [False, False]
            for i, j, diagonal in tiles(ring.rank, source, ring.size, work.causal):
                here, there = _half(i, size), _half(j, size)
                targets = [x[place] for x, place in ((dq, here), (dk, there), (dv, there))]
                again = [started[i], touched[j], touched[j]]
                grads = [ring.room(f"tile {n}", x.shape, x.dtype, xp) if more else x
                         for n, (x, more) in enumerate(zip(targets, again))]
                work.backward((q[here], k[there], v[there], o[here], g[here]), (known[2 * i], known[2 * i + 1]), grads,
                              source, i, j, diagonal)
                for x, found, more in zip(targets, grads, again):
                    if more:
                        x += found
                started[i] = touched[j] = True
            sums.pass_on(mine, [np.s_[:, j * size:(j + 1) * size] for j in range(2) if touched[j]])
        result[..., result.shape[2] // 3:] = sums.home()
        return result


class _Work:
    """One chunk of queries against one chunk of keys, some heads at a time, and between them the messages are looked after."""

    def __init__(self, ring: Ring, heads: int, causal: bool, scale: float, size: int, first_head: int,
                 dropped: tuple[Array, int, float] | None, kernels: tuple[Any, Any]):
        self.ring, self.heads, self.causal, self.scale, self.size = ring, heads, causal, scale, size
        self.first_head, self.dropped, self.kernels = first_head, dropped, kernels

    def forward(self, q: Array, k: Array, v: Array, out: Array, *tile: Any) -> Known:
        known: list[Known] = []
        for heads, dropping in self._pieces(q, *tile):
            known.append(self.kernels[0](q[:, heads], k[:, heads], v[:, heads], out[:, heads], self.scale, tile[-1], dropping))
        if len(known) == 1:
            return known[0]
        concatenate = array_module(q).concatenate
        return concatenate([tops for tops, _ in known], axis=1), concatenate([inverses for _, inverses in known], axis=1)

    def backward(self, arrays: tuple[Array, ...], known: Known, grads: list[Array], *tile: Any) -> None:
        packed = array_module(arrays[0]).ascontiguousarray
        for heads, dropping in self._pieces(arrays[0], *tile):
            self.kernels[1](*(x[:, heads] for x in arrays), *(packed(x[:, heads]) for x in known), self.scale, tile[-1],
                                 *(x[:, heads] for x in grads), dropping)

    def _pieces(self, q: Array, source: int, i: int, j: int, diagonal: bool) -> Iterator[tuple[slice, DroppingWindow | None]]:
        count = min(max(AT_ONCE // (len(q) * self.size ** 2), 1), self.heads)
        n, size = self.ring.size, self.size
        query, key = chunks(self.ring.rank, n)[i] * size, chunks(source, n)[j] * size
        for first in range(0, self.heads, count):
            yield slice(first, first + count), None if self.dropped is None else DroppingWindow(
                *self.dropped, whole=(2 * n * size, 2 * n * size), corner=(self.first_head + first, query, key))
            self.ring.progress()


def _keys(ring: Ring, qkv: Array) -> Array:
    """Keys and values (B, L, 2 * H * D), as they travel."""
    xp, width = array_module(qkv), qkv.shape[2] // 3
    own = ring.room("own keys and values", (*qkv.shape[:2], 2 * width), qkv.dtype, xp)
    own[...] = qkv[..., width:]
    return own


def _heads(x: Array, heads: int, parts: int) -> Array:
    """(parts, B, H, L, D) of (B, L, parts * H * D), as a view."""
    return x.reshape(*x.shape[:2], parts, heads, x.shape[2] // (parts * heads)).transpose(2, 0, 3, 1, 4)


def _half(number: int, size: int) -> Any:
    """The index of one chunk of arrays (B, H, L, D)."""
    return np.s_[:, :, number * size:(number + 1) * size]


