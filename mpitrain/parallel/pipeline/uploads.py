"""Batches on their way to a device while it computes the step before.

    host    batch k + 1 into pinned memory ---+
    copies                     wait until slot was read ... pinned -> slot
    device  step k (reads the other slot)                          step k + 1 waits for the copy, then reads this slot

Two slots take turns, each with the arrays of one step, so a batch costs no wait of the host and none of the device that the copy
can be hidden behind. A copy into a slot begins once the step that read it has been done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpitrain.backend import Array, Device
from mpitrain.data import MicroBatch
from mpitrain.data.stored import StoredRows
from mpitrain.parallel.pipeline.feed import Feed

Batch = tuple[int, list[MicroBatch]]
KEPT = 4                       # shapes: those of a last batch, of a last micro-batch and of both


class Slot:
    """Arrays on the device with the pinned memory they are copied from, by place in the batch, shape and dtype; of each place the
    KEPT last ones."""

    def __init__(self, device: Device, stream: Any):
        self._cuda, self._xp, self._stream = device.xp.cuda, device.xp, stream
        self._arrays: dict[tuple[int, str], OrderedDict[tuple[Any, ...], tuple[Array, np.ndarray[Any, Any]]]] = {}
        self._arrived, self._read = (device.xp.cuda.Event(disable_timing=True) for _ in range(2))
        self._is_used = False

    def send(self, micro_batches: Sequence[tuple[MicroBatch, Any, Any]]) -> list[MicroBatch]:
        """The micro-batches with their x and y on the way here."""
        if self._is_used:
            self._arrived.synchronize()                       # The pinned memory has been read: two steps ago, so long since.
            self._stream.wait_event(self._read)
        sent = [replace(micro, there=(self._send(x, i, "x"), self._send(y, i, "y")))
                for i, (micro, x, y) in enumerate(micro_batches)]
        self._arrived.record(self._stream)
        self._is_used = True
        return sent

    def _send(self, values: Any, place: int, what: str) -> Any:
        if isinstance(values, StoredRows):
            return values.through(lambda array, name: self._send(array, place, name))
        known, key = self._arrays.setdefault((place, what), OrderedDict()), (values.shape, values.dtype.str)
        if key not in known:
            if len(known) >= KEPT:                            # Its copy is over, and new arrays wait for who may read it.
                known.popitem(last=False)
            memory = self._cuda.alloc_pinned_memory(max(values.nbytes, 1))
            known[key] = self._xp.empty(values.shape, values.dtype), np.frombuffer(
                memory, values.dtype, values.size).reshape(values.shape)
            free = self._cuda.Event(disable_timing=True)
            free.record()                                     # An array that was there may be read by what was asked for before.
            self._stream.wait_event(free)
        known.move_to_end(key)
        there, pinned = known[key]
        np.copyto(pinned, values)
        there.set(pinned, stream=self._stream)
        return there

    def begin(self) -> None:
        """What the device is asked for from now on may read the slot."""
        self._cuda.get_current_stream().wait_event(self._arrived)

    def end(self) -> None:
        """All that reads the slot has been asked for."""
        self._read.record()


class Uploads:
    """Brings the batches of a loader to `feed`'s device, one step ahead."""

    def __init__(self, feed: Feed):
        self.feed, stream = feed, feed.device.xp.cuda.Stream(non_blocking=True)
        self._slots = Slot(feed.device, stream), Slot(feed.device, stream)

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; the next one is on its way when one is given."""
        slots = self._slots
        waiting: Batch | None = None
        for number, (step, micro_batches) in enumerate(batches):
            slot = slots[number % 2]
            sent = slot.send([(m, self.feed.host_inputs(m.x), self.feed.host_targets(m.y)) for m in micro_batches])
            if waiting is not None:
                yield from self._given(waiting, slots[1 - number % 2])
            waiting = step, sent
            last = slot
        if waiting is not None:
            yield from self._given(waiting, last)

    @staticmethod
    def _given(batch: Batch, slot: Slot) -> Iterator[Batch]:
        slot.begin()
        yield batch
        slot.end()
