"""The interpreter of collective steps: runs one rank's rounds over MPI point-to-point messages, blocking or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpitrain.comm.buffers import Host
from mpitrain.comm.signature import HEADER_BYTES, Signature, unpack
from mpitrain.errors import DesyncError, PeerError
from mpitrain.schedules.steps import Copy, Receive, Reduce, Round, Send, Slice

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.comm.progress import Progress

HEADER_TAG = 0
MESSAGE_BYTES = 1 << 30        # longer ones are split: MPI 3 counts in 32 bits


class Messages(NamedTuple):
    """One round, ready to run: messages as (buffer, first byte, last byte + 1, peer), and the arithmetic that follows."""

    receives: tuple[tuple[str, int, int, int], ...]
    sends: tuple[tuple[str, int, int, int], ...]
    compute: tuple[Reduce | Copy, ...]


def translate(rounds: Iterable[Round], itemsize: int, message_bytes: int = MESSAGE_BYTES) -> list[Messages]:
    """Rounds over elements as messages over bytes, long ones split; rounds in which this rank does nothing are left out."""
    def split(part: Slice, peer: int) -> list[tuple[str, int, int, int]]:
        stop = part.stop * itemsize
        return [(part.buffer, start, min(start + message_bytes, stop), peer)
                for start in range(part.start * itemsize, stop, message_bytes)]

    return [Messages(tuple(piece for step in round_ if isinstance(step, Receive) for piece in split(step.into, step.peer)),
                     tuple(piece for step in round_ if isinstance(step, Send) for piece in split(step.what, step.peer)),
                     tuple(step for step in round_ if isinstance(step, (Reduce, Copy))))
            for round_ in rounds if round_]


class Header:
    """The signature on its way to the next rank, and the previous rank's on its way here."""

    def __init__(self, comm: MPI.Comm, channel: str, sequence: int, signature: Signature):
        self._channel, self._sequence, self._signature = channel, sequence, signature
        self._rank, self._previous = comm.rank, (comm.rank - 1) % comm.size
        self._arriving, leaving = bytearray(HEADER_BYTES), bytearray(HEADER_BYTES)
        signature.pack_into(leaving, sequence)
        self._leaving = leaving                               # MPI reads it until the send has ended
        self._receive = comm.Irecv(self._arriving, self._previous, HEADER_TAG)
        self._send = comm.Isend(leaving, (comm.rank + 1) % comm.size, HEADER_TAG)
        self._checked = False

    def test(self) -> bool:
        """Whether the neighbour is known to run the same collective. DesyncError if it runs another one."""
        if not self._checked and self._receive.Test():
            self._check()
        return self._checked

    def wait(self) -> None:
        if not self._checked:
            self._receive.Wait()
            self._check()

    def sent(self) -> bool:
        return bool(self._send.Test())

    def wait_sent(self) -> None:
        self._send.Wait()

    def _check(self) -> None:
        sequence, checksum, text = unpack(self._arriving)
        if (sequence, checksum) != (self._sequence, self._signature.checksum):
            raise DesyncError(f'channel "{self._channel}": rank {self._rank} is at collective {self._sequence}, '
                              f"{self._signature.text}; rank {self._previous} is at collective {sequence}, {text}; "
                              f"every rank must start the same collectives in the same order")
        self._checked = True


class Work:
    """A collective on its way. `test` moves it on without blocking; `wait` returns when its result is in the array.

    Rounds are posted one after the other: the messages of a round, then its arithmetic, then the next round's messages. Nothing
    moves unless somebody calls `test` or `wait` (of this or any other Work of the same Progress).
    """

    def __init__(self, comm: MPI.Comm, rounds: Sequence[Messages], data: Host, inbox: Host, *, label: str, tag: int,
                 header: Callable[[], Header] | None, progress: Progress, finish: Callable[[], None]):
        from mpi4py import MPI
        self._mpi: Any = MPI
        self._comm, self._tag, self._label = comm, tag, label
        self._memory = {"data": data, "inbox": inbox}
        self._bytes = {name: array.view(np.uint8) for name, array in self._memory.items()}
        self._rounds, self._index = rounds, -1
        self._requests: list[MPI.Request] = []
        self._finish, self._progress = finish, progress
        self.done = False
        self._header: Header | None = self._guarded(header) if header is not None else None
        self._guarded(self._next_round)

    def test(self) -> bool:
        """Move on as far as messages have landed; whether the result is there. Never blocks."""
        return self.done or bool(self._guarded(self._advance))

    def wait(self) -> None:
        """Return when the result is there.

        With others in flight all of them are moved, so ranks may wait in different orders without a deadlock.
        """
        while not self.done:
            if self._progress.only(self):
                self._guarded(self._block)
            elif not self.test():
                self._progress.progress()
                os.sched_yield()                              # ranks may outnumber cores; polling must not starve the peer
        self._progress.discard(self)

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except self._mpi.Exception as error:
            raise PeerError(f"{self._label}: MPI reports {error}; another rank was probably lost") from error

    def _advance(self) -> bool:
        if self._header is not None and not self._header.test():
            return False
        while self._mpi.Request.Testall(self._requests):
            if self._finish_round():
                return True
        return False

    def _block(self) -> None:
        if self._header is not None:
            self._header.wait()
        self._mpi.Request.Waitall(self._requests)
        self._finish_round()

    def _finish_round(self) -> bool:
        """The arithmetic of the round whose messages have landed, then the next one; True after the last."""
        if self._index < len(self._rounds):
            self._compute(self._rounds[self._index].compute)
            self._next_round()
            return False
        if self._header is not None:
            self._header.wait_sent()                          # the next rank has posted its receive, or MPI has buffered it
        self.done = True
        self._finish()
        return True

    def _next_round(self) -> None:
        self._index += 1
        if self._index == len(self._rounds):
            self._requests = []
            return
        receives, sends, _ = self._rounds[self._index]
        irecv, isend, memory, tag = self._comm.Irecv, self._comm.Isend, self._bytes, self._tag
        requests = [irecv(memory[buffer][start:stop], peer, tag) for buffer, start, stop, peer in receives]    # before sends:
        requests += [isend(memory[buffer][start:stop], peer, tag) for buffer, start, stop, peer in sends]      # they find a place
        self._requests = requests

    def _compute(self, steps: Sequence[Reduce | Copy]) -> None:
        if not steps:
            return
        with np.errstate(over="ignore", invalid="ignore"):    # whoever uses the sum looks for Inf and NaN and says where
            for step in steps:
                if isinstance(step, Reduce):
                    np.add(self._view(step.left), self._view(step.right), out=self._view(step.into))
                else:
                    self._view(step.into)[...] = self._view(step.what)

    def _view(self, part: Slice) -> Host:
        return self._memory[part.buffer][part.start:part.stop]
