"""Collectives on memory of a device that MPI is handed as it is: nothing is copied to the host.

Only an MPI that takes such addresses may be handed them; another one crashes (`gpu_probe`). The device packs, adds and copies, by
a stream beside that of the computation; MPI knows nothing of streams, so messages leave when the device has done what is before
them, and arithmetic begins when they have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpitrain.backend import Array, array_module
from mpitrain.backend.runtime import address
from mpitrain.comm.messages.interpreter import HeadedWork, Start, carry_out
from mpitrain.comm.messages.prepare import PACKED, Plan
from mpitrain.comm.messages.program import Operation
from mpitrain.kernels.wire import Format

if TYPE_CHECKING:
    from mpi4py import MPI


class DeviceWork(HeadedWork):
    """What `StepsWork` is, for an array of a device; its first round begins when the values are written. Uses `stream`.

    The bits are those of the host.
    """

    def __init__(self, start: Start, plan: Plan, array: Array, tag: int, packing: Format | None, stream: Any):
        super().__init__(start)
        xp = array_module(array)
        self._rounds, self._tag, self._stream, self._add = plan.rounds, tag, stream, xp.add
        self._memory = {"data": array.reshape(-1)} | {name: xp.empty(size, PACKED if name.endswith("16") else array.dtype)
                                                      for name, size in plan.elements.items()}
        self._packing: Format | None = None
        if packing is not None:
            from mpitrain.kernels.device.wire import format_of
            self._packing = format_of(packing.name)
        self._event = xp.cuda.Event(disable_timing=True)
        self._event.record()                                  # of the current stream, which has written the values
        self._requests: list[MPI.Request] = []
        self._senders: tuple[int, ...] = ()
        self._course = self._run()
        self._reached: Callable[[], bool] = next(self._course)

    def _run(self) -> Iterator[Callable[[], bool]]:
        """Does the rounds, and yields what must be so before it goes on."""
        yield self._computed
        for before, receives, sends, after in self._rounds:
            self._requests = [self._comm.Irecv(self._at(b, start, stop), peer, self._tag) for b, start, stop, peer in receives]
            yield from self._compute(before)
            self._requests += [self._comm.Isend(self._at(b, start, stop), peer, self._tag) for b, start, stop, peer in sends]
            self._senders = tuple(sorted({peer for *_, peer in receives}))
            yield self._arrived
            self._senders = ()
            yield from self._compute(after)
        yield self._same

    def _advance(self) -> bool:
        while self._reached():
            then = next(self._course, None)
            if then is None:
                self._memory.clear()
                return self._land()
            self._reached = then
        return False

    def _peers(self) -> tuple[int, ...]:
        return super()._peers() or self._senders

    def _computed(self) -> bool:
        return bool(self._event.done)

    def _arrived(self) -> bool:
        return self._same() and bool(self._mpi.Request.Testall(self._requests))

    def _at(self, buffer: str, start: int, stop: int) -> Any:
        """Bytes [start, stop) of a buffer, by their address: nobody but MPI looks there."""
        return self._mpi.buffer.fromaddress(address(self._memory[buffer]) + start, stop - start)

    def _compute(self, operations: Sequence[Operation]) -> Iterator[Callable[[], bool]]:
        if not operations:
            return
        with self._stream:
            carry_out(operations, self._memory, self._packing, self._add)
            self._event.record(self._stream)
        yield self._computed
