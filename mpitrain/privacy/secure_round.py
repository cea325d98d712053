"""A round of the secure sum over ranks, each of which acts some of the clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpitrain.privacy.fixed_point import FixedPoint
from mpitrain.privacy.key_agreement import PUBLIC_BYTES
from mpitrain.privacy.secret_sharing import SHARE_BYTES
from mpitrain.privacy.secure_sum import SEALED_BYTES, Client, Opened, Public, least, left_masks, refused, secrets_of, take_off

OPENED_BYTES = 1 + SHARE_BYTES                                # one byte says which secret the share is of, or that there is none


class Sums(Protocol):
    """What connects the ranks; a `comm` channel is one."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def allreduce(self, array: Any, *, name: str) -> None:
        """`array` becomes its sum over ranks, of unsigned integers modulo their size."""


class SecureRound:
    """Made by all ranks alike, with the numbers of the clients that share keys in it, and of those that this rank acts; new keys,
    which nothing outlives. All ranks then `add` what their clients send, if it comes, and `finish` together.

    Costs, for n clients in all: 2 n^2 agreements of keys, 4 ms each, shared out over the ranks; each client 132 bytes for each
    other; and n masks for each vector, 0.8 ms for 61,706 words. ConfigError, on all ranks, for a `threshold` that is no share of
    clients above a half.
    """

    def __init__(self, channel: Sums, clients: Sequence[int], own: Collection[int], numbers: FixedPoint, length: int,
                 threshold: float):
        self.channel, self.numbers = channel, numbers
        self.clients = sorted(clients)
        self.threshold = least(threshold, len(self.clients))
        if len(self.clients) < 2:
            raise refused(len(self.clients), max(2, self.threshold), "share keys")
        assert len(self.clients) <= numbers.count
        self.place = {number: at for at, number in enumerate(self.clients)}
        self.own = {number: Client(number) for number in self.clients if number in own}
        self.total = np.zeros(length, np.uint32)
        self.came: set[int] = set()
        shown = self._rows({n: client.public.to_bytes() for n, client in self.own.items()}, 2 * PUBLIC_BYTES, "public keys")
        self.everyone = {number: Public.from_bytes(shown[at].tobytes()) for at, number in enumerate(self.clients)}
        self._share()

    def _share(self) -> None:
        """Every client's sealed shares to every other."""
        sealed = {n: client.share(self.everyone, self.threshold) for n, client in self.own.items()}
        width = SEALED_BYTES * len(self.clients)
        rows = {n: b"".join(texts.get(other, bytes(SEALED_BYTES)) for other in self.clients) for n, texts in sealed.items()}
        told = self._rows(rows, width, "sealed shares").reshape(len(self.clients), len(self.clients), SEALED_BYTES)
        for number, client in self.own.items():
            for other in client.others:
                client.receive(other, told[self.place[other], self.place[number]].tobytes())

    def add(self, number: int, values: Any) -> None:
        """What client `number`, of this rank, sends: its `values`, as integers under its masks."""
        assert number not in self.came, "two vectors under one mask tell their difference"
        self.total += self.own[number].masked(self.numbers.encode(values))
        self.came.add(number)

    def finish(self, answers: Callable[[int], bool] = lambda number: True) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The sum of the vectors that came, on every rank. `answers` says which clients are there at the end, beside those
        that have sent nothing: they have gone. PrivacyError on all ranks, before any share is told, where too few are there."""
        flags = self._rows({n: bytes([n in self.came, n in self.came and answers(n)]) for n in self.own}, 2, "clients that came")
        came, there = ([n for n, row in zip(self.clients, flags) if row[k]] for k in (0, 1))
        for count, did in ((len(came), "send a vector"), (len(there), "answer at the end")):
            if count < self.threshold:
                raise refused(count, self.threshold, did)
        seeds, secrets = secrets_of(self._open(came, there), self.threshold)
        gone = {n: secrets[n] for n in self.clients if n not in set(came)}
        own_part = came[self.channel.rank::self.channel.size]     # Each rank takes off the masks of some.
        take_off(self.total, left_masks(seeds, gone, self.everyone, own_part))
        self.channel.allreduce(self.total, name="masked sum")
        self.own.clear()
        return self.numbers.decode(self.total)

    def _open(self, came: Sequence[int], there: Sequence[int]) -> Mapping[int, list[Opened]]:
        """What all clients that are there tell, on every rank."""
        rows = {}
        for number in self.own.keys() & set(there):
            told = bytearray(OPENED_BYTES * len(self.clients))
            for one in self.own[number].open(came):
                at = OPENED_BYTES * self.place[one.of]
                told[at:at + OPENED_BYTES] = bytes([1 + one.own_mask]) + one.share.to_bytes(SHARE_BYTES, "little")
            rows[number] = bytes(told)
        table = self._rows(rows, OPENED_BYTES * len(self.clients), "opened shares").reshape(
            len(self.clients), len(self.clients), OPENED_BYTES)
        return {number: [Opened(of, bool(row[0] - 1), int.from_bytes(row[1:].tobytes(), "little"))
                         for of, row in zip(self.clients, table[self.place[number]]) if row[0]] for number in there}

    def _rows(self, own: Mapping[int, bytes], width: int, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """A row of bytes for each client, on every rank: zero where another rank writes, so that the sum joins them."""
        rows = np.zeros((len(self.clients), width), np.uint8)
        for number, text in own.items():
            rows[self.place[number]] = np.frombuffer(text, np.uint8)
        flat = rows.reshape(-1)
        self.channel.allreduce(flat, name=name)
        return rows
