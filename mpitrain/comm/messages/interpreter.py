"""The interpreter of collective steps: runs one rank's rounds over MPI point-to-point messages, blocking or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpitrain.comm.messages.buffers import Host
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


class Header:
    """The signature on its way to the next rank, and the previous rank's on its way here."""

    def __init__(self, comm: MPI.Comm, channel: str, sequence: int, signature: Signature):
        self._channel, self._sequence, self._signature = channel, sequence, signature
        self._comm = comm
        room = PAIR_BYTES if comm.size == 2 else 0
        self._arriving, leaving = np.empty(HEADER_BYTES + room, np.uint8), bytearray(HEADER_BYTES)
        signature.pack_into(leaving, sequence)
        self._leaving = leaving                               # MPI reads it until the send has ended
        self._receive = comm.Irecv(self._arriving, (comm.rank - 1) % comm.size, HEADER_TAG)
        self._send = comm.Isend(leaving, (comm.rank + 1) % comm.size, HEADER_TAG)
        self.checked = False

    def test(self) -> bool:
        """Whether the neighbour is known to run the same collective. DesyncError if it runs another one."""
        if not self.checked and self._receive.Test():
            self._check()
        return self.checked

    def wait(self) -> None:
        if not self.checked:
            self._receive.Wait()
            self._check()

    def sent(self) -> bool:
        return bool(self._send.Test())

    def wait_sent(self) -> None:
        self._send.Wait()

    def _check(self) -> None:
        check_header(self._arriving, self._comm, self._channel, self._sequence, self._signature)
        self.checked = True


def check_header(arrived: Host, comm: MPI.Comm, channel: str, sequence: int, signature: Signature) -> None:
    """DesyncError unless the rank before this one sent the same sequence number and signature."""
    theirs, checksum, text = unpack(arrived)
    if (theirs, checksum) != (sequence, signature.checksum):
        raise DesyncError(f'channel "{channel}": rank {comm.rank} is at collective {sequence}, {signature.text}; '
                          f"rank {(comm.rank - 1) % comm.size} is at collective {theirs}, {text}; "
                          f"every rank must start the same collectives in the same order")


class Lane:
    """One program of a `StepsWork`, with the requests of its current round."""

    def __init__(self, rounds: Sequence[Messages], tag: int):
        self.rounds, self.tag, self.index = rounds, tag, -1
        self.requests: list[MPI.Request] = []


class StepsWork(PolledWork):
    """A collective on its way. `test` moves it on without blocking; `wait` returns when its result is in the array.

    In each lane rounds are posted one after the other: the packing of a round, its messages, its arithmetic, then the next
    round. Nothing moves unless somebody calls `test` or `wait` (of this or any other work of the same Progress). `memory` are
    the arrays that the messages and operations name; `tag` and those after it, one for each lane, are this work's own.
    """

    def __init__(self, comm: MPI.Comm, programs: Sequence[Sequence[Messages]], memory: dict[str, Host], *, what: str,
                 channel: str, tags: Iterable[int], header: Callable[[], Header] | None, progress: Progress,
                 finish: Callable[[], None], packing: Format | None = None):
        super().__init__(what, channel, progress, finish)
        self._comm, self._packing = comm, packing
        self._memory = memory
        self._bytes = {name: array.view(np.uint8) for name, array in memory.items()}
        self._lanes = [Lane(rounds, tag) for rounds, tag in zip(programs, tags)]
        self._header: Header | None = self._guarded(header) if header is not None else None
        self._guarded(self._begin)

    def wait(self) -> None:
        """Return when the result is there.

        All works in flight are moved meanwhile, so ranks may wait in different orders without a deadlock.
        """
        while not self.done:
            if self._progress.only(self) and len(self._lanes) <= 1:
                self._guarded(self._block)
            elif not self.test():
                self._progress.progress()
                os.sched_yield()
        self._progress.discard(self)

    def _peers(self) -> tuple[int, ...]:
        if self._header is not None and not self._header.checked:
            return ((self._comm.rank - 1) % self._comm.size,)
        return tuple(sorted({peer for lane in self._lanes for *_, peer in lane.rounds[lane.index].receives}))

    def _begin(self) -> None:
        self._lanes = [lane for lane in self._lanes if self._next_round(lane)]

    def _advance(self) -> bool:
        if self._header is not None and not self._header.test():
            return False
        for lane in list(self._lanes):
            while self._mpi.Request.Testall(lane.requests):
                if not self._finish_round(lane):
                    break
        return not self._lanes and self._land()

    def _block(self) -> None:
        if self._header is not None:
            self._header.wait()
        if self._lanes:
            self._mpi.Request.Waitall(self._lanes[0].requests)
            self._finish_round(self._lanes[0])
        if not self._lanes:
            self._land()

    def _land(self) -> bool:
        if self._header is not None:
            self._header.wait_sent()                          # the next rank has posted its receive, or MPI has buffered it
        return super()._land()

    def _finish_round(self, lane: Lane) -> bool:
        """The arithmetic of the round whose messages have landed, then the next one; False after the lane's last."""
        self._compute(lane.rounds[lane.index].after)
        more = self._next_round(lane)
        if not more:
            self._lanes.remove(lane)
        return more

    def _next_round(self, lane: Lane) -> bool:
        lane.index += 1
        if lane.index == len(lane.rounds):
            return False
        before, receives, sends, _ = lane.rounds[lane.index]
        irecv, isend, memory, tag = self._comm.Irecv, self._comm.Isend, self._bytes, lane.tag
        requests = [irecv(memory[buffer][start:stop], peer, tag) for buffer, start, stop, peer in receives]    # before sends:
        self._compute(before)                                                                             # they find a place
        requests += [isend(memory[buffer][start:stop], peer, tag) for buffer, start, stop, peer in sends]
        lane.requests = requests
        return True

    def _compute(self, operations: Sequence[Operation]) -> None:
        if not operations:
            return
        with np.errstate(over="ignore", invalid="ignore"):    # users of the sum look for Inf and NaN and say where
            for name, parts in operations:
                views = [self._memory[buffer][start:stop] for buffer, start, stop in parts]
                if name == "sum":
                    np.add(views[0], views[1], out=views[2])
                elif name == "copy":
                    views[1][...] = views[0]
                else:
                    getattr(self._packing, name)(*views)
