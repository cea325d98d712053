"""The engines of collectives in shared memory: they publish when a rank's array is ready, wait, and sum; in C or by NumPy.

A collective passes through states, each rank in its own time:

    QUEUED    its slot of the control block is still in use by the collective SLOTS before it
    ARRIVED   this rank's array is ready and its record published; waits for the others' arrays
    SUMMED    this rank's slice is summed and written to all; waits for the others' slices
    PARTLY    this rank's slice is the node's sum: it goes to the other nodes, then to all ranks of this one unless it is to stay
              (a slice that stays goes from ARRIVED to DONE where C has done its `passes`)
    DONE      the result is in the array, and nobody writes it any more, nor reads it unless slices stay

`Native` sleeps on a futex; see native/shared.c. `Polling` relies on this: an aligned 8-byte store by NumPy is one store, and x86
lets no processor see two stores of another in the wrong order, nor loads overtake loads. On other CPUs it is not used.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpitrain.backend import native
from mpitrain.comm.messages.buffers import Host
from mpitrain.comm.messages.signature import HEADER_BYTES, Signature, unpack
from mpitrain.comm.shared.fold import TYPES, addresses, fold_numpy, storage

SLOTS = 16                                                    # so many collectives may wait for a slow rank at once
SCRATCH_BYTES = 8 << 10                                      # arrays up to this are copied rather than summed in place
GATE_BYTES = 128
MESSAGE, ONE_SHOT, TWO_SHOT, PARTIAL, SCATTER = range(5)
QUEUED, ARRIVED, SUMMED, DONE, PARTLY = range(5)
X86 = ("x86_64", "AMD64", "i686")


class Control:
    """The memory by which all ranks of a node coordinate: gates and words, [slots][n] records, [n][slots] scratch buffers."""

    def __init__(self, block: Host, n: int, rank: int):
        gates, words, records, scratch = np.split(block, np.cumsum(self._sizes(n))[:3])
        self.n, self.rank, self.gates, self.records = n, rank, gates, records.reshape(SLOTS, n, HEADER_BYTES)
        self.words: Any = words.view(np.uint64).reshape(SLOTS, 2, n, 8)[..., 0]
        self.scratch = scratch.reshape(n, SLOTS, SCRATCH_BYTES)

    @staticmethod
    def _sizes(n: int) -> list[int]:
        return [SLOTS * 2 * GATE_BYTES, SLOTS * 2 * n * 64, SLOTS * n * HEADER_BYTES, n * SLOTS * SCRATCH_BYTES]

    @classmethod
    def nbytes(cls, n: int) -> int:
        return sum(cls._sizes(n))

    def record(self, sequence: int, rank: int) -> tuple[int, str]:
        """(sequence number, signature) that a rank published in the slot of collective `sequence`."""
        number, _, text = unpack(bytearray(self.records[sequence % SLOTS, rank]))
        return number, text


class Turn(ctypes.Structure):
    """The number of a channel's next collective, and the ns that it waits awake."""

    _fields_ = [("sequence", ctypes.c_int64), ("spin", ctypes.c_int64)]
    sequence: int
    spin: int


class Pass(ctypes.Structure):
    """A pass of C over elements [start, stop) of a summed slice, a block at a time while that is in the cache; the layout of
    Pass in native/shared.c. `part` is the address of a C function: see `kernels.optimizer.part_function`."""

    _fields_ = [("part", ctypes.c_void_p), ("arrays", ctypes.c_void_p * 4), ("scalars", ctypes.c_void_p),
                ("start", ctypes.c_int64), ("stop", ctypes.c_int64)]

    def __init__(self, part: int, arrays: Sequence[Host], scalars: Host, start: int, stop: int):
        """`arrays` and `scalars` must live as long as this."""
        addresses = [array.ctypes.data for array in arrays]
        super().__init__(part, (ctypes.c_void_p * 4)(*addresses), scalars.ctypes.data, start, stop)


class Plan(ctypes.Structure):
    """The arguments that every call of one collective shares; the layout of Plan in native/shared.c."""

    _fields_ = [*((name, ctypes.c_int64) for name in ("n", "rank", "slots", "mode", "type", "itemsize", "count", "start", "stop",
                                                      "length", "scratch_bytes")),
                *((name, ctypes.c_void_p) for name in ("slot", "records", "scratch", "program", "arrays", "own", "turn")),
                ("passes", ctypes.c_void_p), ("n_passes", ctypes.c_int64), ("taken", ctypes.c_int64),
                ("record", ctypes.c_char * HEADER_BYTES)]
    mode: int
    own: int
    passes: int
    n_passes: int
    taken: int

    def __init__(self, control: Control, turn: Turn, mode: int, number_type: str, count: int, program: Sequence[int],
                 signature: Signature, arrays: Sequence[Host] = (), own_slice: tuple[int, int] = (0, 0), own: int = 0):
        self.number_type, self.signature, self.own_slice, self._turn = number_type, signature, own_slice, turn
        self.order, self.parts = list(program), list(arrays)
        self.flat = [array.view(storage(number_type)) for array in arrays]
        self._program = np.array(program, np.int32)
        self._addresses = addresses(arrays)
        super().__init__(control.n, control.rank, SLOTS, mode, TYPES.get(number_type, 0), storage(number_type).itemsize, count,
                         *own_slice, len(self.order), SCRATCH_BYTES, control.gates.ctypes.data,
                         control.records.ctypes.data, control.scratch.ctypes.data, self._program.ctypes.data,
                         ctypes.addressof(self._addresses), own, ctypes.addressof(turn), 0, 0, -1)
        ctypes.memmove(ctypes.addressof(self) + Plan.record.offset, signature.header(0), HEADER_BYTES)
        self.pointer = ctypes.addressof(self)

    def follow(self, passes: Any) -> None:
        """Have `passes` (a ctypes array of `Pass`, or None) done in the next collective, once the sum is there."""
        self._passes = passes
        self.n_passes = 0 if passes is None else len(passes)
        self.passes = 0 if passes is None else ctypes.addressof(passes)


class Native:
    """The engine of native/shared.c."""

    def __init__(self, library: Any):
        self._advance, self._spread = library.shared_advance, library.shared_spread
        self._run = native.builtin(library.shared_run, native.NOARGS)

    def advance(self, plan: Plan, array: Host, sequence: int, state: int, spin: int, limit: int) -> int:
        return int(self._advance(plan.pointer, plan.own, sequence, state, spin, limit))

    def spread(self, plan: Plan, array: Host, sequence: int) -> int:
        return int(self._spread(plan.pointer, plan.own, sequence))

    def whole(self, plan: Plan, array: Host, turn: Turn) -> Callable[[], int]:
        return self._run(plan.pointer)


class Polling:
    """The engine by NumPy: a word for each rank, slot and gate holds the collective that entered it last."""

    def __init__(self, control: Control):
        self._control, self._rank = control, control.rank

    def advance(self, plan: Plan, array: Host, sequence: int, state: int, spin: int, limit: int) -> int:
        control, slot = self._control, sequence % SLOTS
        arrived, finished = control.words[slot]
        if state == QUEUED:
            if not _wait_for(finished, sequence - SLOTS + 1, limit):
                return QUEUED
            control.records[slot, self._rank] = np.frombuffer(plan.signature.header(sequence), np.uint8)
            if plan.mode == ONE_SHOT:
                control.scratch[self._rank, slot, :array.nbytes].view(array.dtype)[...] = array
            arrived[self._rank] = sequence + 1
            state = ARRIVED
        if state == ARRIVED:
            if limit < 0 or not _wait_for(arrived, sequence + 1, limit):
                return ARRIVED
            records = control.records[slot, :, :12]
            different = (records != records[self._rank]).any(1)
            if different.any():
                return -1 - int(different.argmax())
            self._sum(plan, array, slot)
            if plan.mode in (PARTIAL, SCATTER):
                return PARTLY
            finished[self._rank] = sequence + 1
            if plan.mode != TWO_SHOT:
                return DONE
            state = SUMMED
        return DONE if state == SUMMED and _wait_for(finished, sequence + 1, limit) else state

    def spread(self, plan: Plan, array: Host, sequence: int) -> int:
        start, stop = plan.own_slice
        for rank, other in enumerate(plan.flat):
            if rank != self._rank and plan.mode == PARTIAL:
                other[start:stop] = array[start:stop]
        self._control.words[sequence % SLOTS, 1, self._rank] = sequence + 1
        return SUMMED if plan.mode == PARTIAL else DONE

    def whole(self, plan: Plan, array: Host, turn: Turn) -> Callable[[], int]:
        def run() -> int:
            plan.taken, turn.sequence = turn.sequence, turn.sequence + 1
            return self.advance(plan, array, plan.taken, QUEUED, turn.spin, turn.spin)
        return run

    def _sum(self, plan: Plan, array: Host, slot: int) -> None:
        if plan.mode == ONE_SHOT:
            sources = [part[:array.nbytes].view(array.dtype) for part in self._control.scratch[:, slot]]
            fold_numpy(sources, plan.order, [array], 0, array.size, plan.number_type)
        elif plan.mode == TWO_SHOT:
            fold_numpy(plan.flat, plan.order, plan.flat, *plan.own_slice, plan.number_type)
        elif plan.mode in (PARTIAL, SCATTER):
            fold_numpy(plan.flat, plan.order, [array], *plan.own_slice, plan.number_type)


Engine: TypeAlias = Native | Polling
"""Moves a collective on from `state` for at most `limit` ns of waiting, the first `spin` of them awake.

`array` is this rank's, flat, which begins at `plan.own`. `limit` below 0 stops at ARRIVED. Returns the new state, or
-1 - rank of a rank whose record differs. `spread` follows PARTLY. `whole` makes a call that begins the next collective and
moves it on while awake; `plan.taken` is its number.
"""


def _wait_for(words: Any, number: int, limit: int) -> bool:
    """Whether all words are at least `number`, within `limit` ns; gives the core away between looks."""
    if number <= 0 or words.min() >= number:
        return True
    end = time.monotonic_ns() + limit
    while time.monotonic_ns() < end:
        os.sched_yield()
        if words.min() >= number:
            return True
    return False


def can_poll() -> bool:
    """Whether this CPU keeps the order of stores that `Polling` relies on."""
    return platform.machine() in X86
