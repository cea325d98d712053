"""The works of a channel: the interpreter of collective steps, which runs one rank's rounds over MPI point-to-point messages,
blocking or not, and the MPI library's own all-reduce, as a choice and as the yardstick for ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpitrain.comm.messages.buffers import Host, Values
from mpitrain.comm.messages.polled import PolledWork
from mpitrain.comm.messages.program import Messages, Operation
from mpitrain.comm.messages.signature import HEADER_BYTES, Signature, unpack
from mpitrain.errors import DesyncError
from mpitrain.kernels.wire import Format

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.comm.messages.progress import Progress

HEADER_TAG = 0
# Data of at most PAIR_BYTES follows the header between two ranks (see pair.py). At 64 KiB that took 28 us, as long as
# MPI_Allreduce; a header and separate rounds took 170 (one run on a busy machine, Open MPI 5.0.11, 2026-11).
PAIR_BYTES = 64 << 10


class Start(NamedTuple):
    """The common part of all works of a channel: its ranks and name, the number and signature of the collective, and `finish`,
    called once when the result has landed."""

    comm: MPI.Comm
    channel: str
    sequence: int
    signature: Signature
    progress: Progress
    finish: Callable[[], None]


def check_header(arrived: Host, comm: MPI.Comm, channel: str, sequence: int, signature: Signature) -> None:
    """DesyncError unless the rank before this one sent the same sequence number and signature."""
    theirs, checksum, text = unpack(arrived)
    if (theirs, checksum) != (sequence, signature.checksum):
        raise DesyncError(f'channel "{channel}": rank {comm.rank} is at collective {sequence}, {signature.text}; '
                          f"rank {(comm.rank - 1) % comm.size} is at collective {theirs}, {text}; "
                          f"every rank must start the same collectives in the same order")


class HeadedWork(PolledWork):
    """A collective behind its header, the signature that goes to the next rank; `data` may follow it there. There is no result
    before the header of the previous rank has come and is the same."""

    def __init__(self, start: Start, data: Host | None = None):
        super().__init__(start.signature.text, start.channel, start.progress, start.finish)
        self._comm, self._sequence, self._signature = start.comm, start.sequence, start.signature
        self._previous = (self._comm.rank - 1) % self._comm.size
        self._known = False                                   # it says whether the previous rank runs the same collective
        self._guarded(partial(self._send_header, data))

    def _send_header(self, data: Host | None) -> None:
        comm, header = self._comm, np.frombuffer(self._signature.header(self._sequence), np.uint8)
        self._arriving = np.empty(HEADER_BYTES + (PAIR_BYTES if comm.size == 2 else 0), np.uint8)
        self._leaving = header if data is None else np.concatenate([header, data])       # MPI reads it until the send has ended
        self._receive = comm.Irecv(self._arriving, self._previous, HEADER_TAG)
        self._send = comm.Isend(self._leaving, (comm.rank + 1) % comm.size, HEADER_TAG)

    def _peers(self) -> tuple[int, ...]:
        return () if self._known else (self._previous,)

    def _same(self) -> bool:
        """Whether the previous rank is known to run the same collective. DesyncError if it runs another one."""
        if not self._known and self._receive.Test():
            self._check()
        return self._known

    def _check(self) -> None:
        check_header(self._arriving, self._comm, self._channel, self._sequence, self._signature)
        self._known = True

    def _land(self) -> bool:
        self._send.Wait()                                     # the next rank has posted its receive, or MPI has buffered it
        return super()._land()


class StepsWork(HeadedWork):
    """A collective on its way. `test` moves it on without blocking; `wait` returns when its result is in the array.

    Rounds are posted one after the other: the packing of a round, its messages, its arithmetic, then the next round. Nothing
    moves unless somebody calls `test` or `wait` (of this or any other work of the same Progress). `memory` are the arrays that
    the messages and operations name; `tag` is this work's own. The first round is posted once the values that are `staged` have
    come to the host.
    """

    def __init__(self, start: Start, rounds: Sequence[Messages], memory: dict[str, Host], tag: int, packing: Format | None,
                 staged: Values):
        super().__init__(start)
        self._rounds, self._memory, self._tag, self._packing, self._index = rounds, memory, tag, packing, -1
        self._bytes = {name: array.view(np.uint8) for name, array in memory.items()}
        self._staged, self.events = staged, staged.events
        if staged.ready():
            self._guarded(self._next_round)

    def wait(self) -> None:
        """Return when the result is there.

        All works in flight are moved meanwhile, so ranks may wait in different orders without a deadlock.
        """
        while not self.done:
            if self._progress.only(self):
                self._guarded(self._block)
            elif not self.test():
                self._progress.progress()
                os.sched_yield()
        self._progress.discard(self)

    def _peers(self) -> tuple[int, ...]:
        current = self._rounds[self._index:self._index + 1] if self._known and self._index >= 0 else ()
        return super()._peers() or tuple(sorted({peer for round_ in current for *_, peer in round_.receives}))

    def _advance(self) -> bool:
        if self._index < 0:
            if not self._staged.ready():
                return False
            self._next_round()
        if not self._same():
            return False
        while self._index < len(self._rounds):
            if not self._mpi.Request.Testall(self._requests):
                return False
            self._finish_round()
        return self._land()

    def _block(self) -> None:
        if self._index < 0:
            self._staged.wait()
            self._next_round()
        if not self._known:
            self._receive.Wait()
            self._check()
        if self._index < len(self._rounds):
            self._mpi.Request.Waitall(self._requests)
            self._finish_round()
        if self._index == len(self._rounds):
            self._land()

    def _finish_round(self) -> None:
        """The arithmetic of the round whose messages have landed, then the next one."""
        self._compute(self._rounds[self._index].after)
        self._next_round()

    def _next_round(self) -> None:
        self._index += 1
        if self._index == len(self._rounds):
            return
        before, receives, sends, _ = self._rounds[self._index]
        irecv, isend, memory, tag = self._comm.Irecv, self._comm.Isend, self._bytes, self._tag
        requests = [irecv(memory[buffer][start:stop], peer, tag) for buffer, start, stop, peer in receives]    # before sends:
        self._compute(before)                                                                             # they find a place
        requests += [isend(memory[buffer][start:stop], peer, tag) for buffer, start, stop, peer in sends]
        self._requests: list[MPI.Request] = requests

    def _compute(self, operations: Sequence[Operation]) -> None:
        if not operations:
            return
        with np.errstate(over="ignore", invalid="ignore"):    # users of the sum look for Inf and NaN and say where
            carry_out(operations, self._memory, self._packing, np.add)


def carry_out(operations: Sequence[Operation], memory: Any, packing: Any, add: Callable[..., Any]) -> None:
    """Sums, copies and packs parts of the buffers in `memory`, by the array module that has `add`."""
    for name, parts in operations:
        views = [memory[buffer][start:stop] for buffer, start, stop in parts]
        if name == "sum":
            add(views[0], views[1], out=views[2])
        elif name == "copy":
            views[1][...] = views[0]
        else:
            getattr(packing, name)(*views)


class LibraryWork(HeadedWork):
    """An `MPI_Iallreduce` on its way, in pieces of at most `piece_bytes`.

    All pieces are posted at once, because all ranks must post theirs in one order; the header finds a rank that runs another
    collective, and is checked before any piece is waited for. The library chooses the order of the sum.
    """

    def __init__(self, start: Start, array: Host, piece_bytes: int):
        super().__init__(start)
        self._array, self._piece = array, max(piece_bytes // array.itemsize, 1)
        self._requests: list[MPI.Request] = self._guarded(self._post)

    def _post(self) -> list[MPI.Request]:
        return [self._comm.Iallreduce(self._mpi.IN_PLACE, self._array[start:start + self._piece])
                for start in range(0, self._array.size, self._piece)]

    def _advance(self) -> bool:
        return self._same() and self._mpi.Request.Testall(self._requests) and self._land()
