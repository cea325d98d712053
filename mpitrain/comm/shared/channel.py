"""All-reduce in memory that the ranks of a node share: no message, no copy, one pass over the data.

    rank 0's array   [ slice 0 | slice 1 ]        each rank waits until all arrays are ready, sums its slice of all of them
    rank 1's array   [ slice 0 | slice 1 ]        in a fixed order and writes the sum into every array: two phases, 2 S bytes
                         ^ 0       ^ 1            moved a rank, whatever the number of ranks

Small arrays are copied into a scratch buffer each instead, wherever they lie, and every rank sums all copies for itself: one
phase. With several nodes the slice's sum goes to the ranks of the same number on the other nodes before it is written.
What does not lie in shared memory goes by messages.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpitrain.comm.messages.buffers import Host, own_memory
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.progress import Progress
from mpitrain.comm.messages.signature import Signature
from mpitrain.comm.shared import engine
from mpitrain.comm.shared.engine import (
    ARRIVED,
    DONE,
    MESSAGE,
    ONE_SHOT,
    PARTIAL,
    PARTLY,
    QUEUED,
    SUMMED,
    TWO_SHOT,
    Control,
    Engine,
    Plan,
    Turn,
)
from mpitrain.comm.shared.fold import TYPES, check_program, kernels, left_fold, type_name
from mpitrain.comm.shared.node import Node
from mpitrain.comm.shared.queue import Known, Mover, SharedWork
from mpitrain.comm.shared.window import address_of, inside, slice_between_lines
from mpitrain.errors import DesyncError, ShapeError

if TYPE_CHECKING:
    from mpitrain.comm.messages.channel import AnyWork
    from mpitrain.schedules.steps import Algorithm

Order: TypeAlias = Callable[[int], Sequence[int]]             # n -> a program of `comm.shared.fold` that adds up n arrays
SPIN = 30_000                         # ns awake before sleeping: a flag crosses cores in 0.1 us, a wake-up takes 5 to 50
LIMIT = 100_000_000                   # ns in C at a time; then signals, other messages, and a look at the time
LIMIT_CROSSING = 1_000_000            # the same where messages to other nodes must move meanwhile
LOOK = 0.25                           # s of waiting before a look at whether the others live, and between looks
KNOWN = 4096                          # arrays remembered by a channel; more buckets than any model has


class SharedChannel:
    """`messages`, with memory shared on the node for what lies in it. Owns that channel, not `node`.

    Made and closed by all ranks of the channel together; they must be the ranks that `node` was made from, in its order. All
    methods are collective in the same order (DesyncError). `order` gives the order in which the ranks of a node are added up, as
    a program of `comm.shared.fold`. Where memory cannot be shared, everything goes by messages and `notes` says why.
    """

    def __init__(self, messages: Channel, node: Node, *, order: Order = left_fold):
        assert (messages.rank, messages.size) == (node.base.rank, node.base.size), "the node is of another communicator"
        self.messages, self.node = messages, node
        self.name, self.size, self.rank = messages.name, messages.size, messages.rank
        self.order = list(order(node.size))
        check_program(self.order, node.size)
        self.cross: Channel | None = None
        self._progress, self._lock = node.progress, threading.Lock()
        self._turn = Turn(0, 0 if node.crowded else SPIN)
        self._limit = LIMIT if node.size == self.size else LIMIT_CROSSING
        self._queue: deque[SharedWork] = deque()
        self._mover = Mover(self)
        self._plans: dict[tuple[int, int, Any, str], Plan] = {}
        self._known: dict[tuple[int, str, Any], Known] = {}
        self._windows: list[list[Host]] = []                  # of each `allocate`: every rank's part
        self.obstacle = self._obstacle()                      # why these ranks cannot share memory, however much there is
        self.notes = [f"{self.name}: {self.obstacle}, messages instead of shared memory"] if self.obstacle else []
        self.shared = not self.notes and self.size > 1
        if self.shared:
            self._open()

    @property
    def shares_all(self) -> bool:
        """Whether all ranks share memory and all of it could be had, so that no sum of arrays in it needs a message."""
        return self.shared and self.cross is None and not self.notes

    @property
    def algorithm(self) -> str | Algorithm:
        return self.messages.algorithm

    def allocate(self, nbytes: int) -> Host:
        """`nbytes` bytes, zero at first, on a cache line; every rank asks for the same sizes in the same order.

        In shared memory where that can be had, else this rank's own; `notes` says which. Valid until the node is closed.
        """
        parts = self.node.allocate(nbytes, self.name) if self.shared else None
        if self.shared and self.messages.gather_objects(parts is None).count(True):
            self.notes += [note for note in self.node.notes if note not in self.notes] or \
                [f"{self.name}: no shared memory on another node, messages instead"]
            parts = None
        if parts is None:
            return own_memory(nbytes)
        self._windows.append(parts)
        return parts[self.node.rank]

    def everywhere(self, own: Host) -> list[Host]:
        """Memory that `allocate` gave, of every rank in rank order; nothing where a rank's cannot be reached from here.

        A rank may read another's once both have come out of a collective that began after it was written.
        """
        found = next((parts for parts in self._windows if parts[self.node.rank] is own), [])
        return list(found) if self.node.size == self.size else []

    def allreduce(self, array: Any, *, name: str, dtype: str | None = None) -> None:
        """Replace `array` by its sum over the ranks, in place; the same bits on every rank.

        An array in memory of `allocate` is remembered: pass the same object each time, and the rest costs least.
        """
        known = self._known.get((id(array), name, dtype))
        if known is None or self._queue:
            self.start_allreduce(array, name, dtype).wait()
            return
        state = known.run()                                   # without a lock: nothing of this channel is in flight
        if state != DONE:
            self._take_up(known, state).wait()

    def start_steps(self, array: Any, name: str, steps: Algorithm) -> AnyWork:
        """Begin an all-reduce of the caller's own steps, by messages; see `Channel.start_steps`."""
        return self.messages.start_steps(array, name, steps)

    def start_allreduce(self, array: Any, name: str, dtype: str | None = None) -> AnyWork | SharedWork:
        """Begin `allreduce` and return; `array` belongs to the work until that is done. Any number may be in flight.

        `dtype` names a number type that NumPy has not: "bfloat16" for an array of uint16.
        """
        known = self._known.get((id(array), name, dtype))
        if known is not None:
            return self._begin(known.plan, known.flat, known.plan.own, None)
        if not self.shared:
            return self._by_messages(array, name, dtype)
        address = address_of(array)
        plan = self._plan(array, address, name, dtype)
        flat = array if array.ndim == 1 else array.reshape(-1)
        if plan.own:
            self._remember(array, name, dtype, plan, flat)
        messages = self._by_messages(array, name, dtype) if plan.mode == MESSAGE and array.size else None
        return self._begin(plan, flat, address, messages)

    @property
    def fuses(self) -> bool:
        """Whether `start_reduce_scatter` takes `passes`: there is a compiler, and no other node has a part in the sum."""
        return self.shared and self._native and self.cross is None

    def start_reduce_scatter(self, array: Any, name: str, own: tuple[int, int], then: Callable[[], None] | None = None,
                             passes: Any = None) -> SharedWork:
        """Begin a sum over the ranks of which this one keeps elements `own` alone, in place; its others are left as they are.

        `array` lies in memory of `allocate`, of float32 or float64. The slices of a node's ranks cover it without overlap, and
        are those of the same-numbered ranks on all nodes. `then` is called once, when the sum is there. `passes` (a ctypes array
        of `flags.Pass`) say what C does with it, block by block; only where `fuses`. The others may still read `array` when the
        work is done.
        """
        known = self._known.get((id(array), name, own))
        if known is None:
            plan = self._plan_of_slice(array, name, own)
            known = self._remember(array, name, own, plan, array.reshape(-1))
        known.plan.follow(passes)
        return self._begin(known.plan, known.flat, known.plan.own, None, then)

    def start_slice(self, array: Any, name: str, own: tuple[int, int], steps: Algorithm) -> AnyWork | SharedWork:
        """Begin a sum of which this rank keeps elements `own`: in memory where `shares_all`, else by messages, by `steps`."""
        if self.shares_all:
            return self.start_reduce_scatter(array, name, own)
        return self.messages.start_slice(array, name, own, steps)

    def _begin(self, plan: Plan, array: Any, address: int, messages: AnyWork | None,
               then: Callable[[], None] | None = None) -> SharedWork:
        with self._lock:
            work = SharedWork(self, plan, array, address, self._turn.sequence, messages, then)
            self._turn.sequence += 1
            waiting = self._queue and self._queue[-1].state in (QUEUED, ARRIVED)
            self._advance(work, -1 if waiting and self.cross is not None else 0)    # other nodes need the order of starts
            if work.state != DONE:
                self._queue.append(work)
                self._mover.enlist()
        return work

    def _take_up(self, known: Known, state: int) -> SharedWork:
        """What one call could not end, for the others were not there in time, as work in flight."""
        with self._lock:
            work = SharedWork(self, known.plan, known.flat, known.plan.own, known.plan.taken, None)
            work.state = self._checked(work, state)
            self._queue.append(work)
            self._mover.enlist()
        return work

    def move(self) -> bool:
        """Move everything in flight as far as the others have come; whether nothing is in flight any more. Never blocks."""
        if not self._lock.acquire(blocking=False):
            return False                                      # another thread does it
        try:
            for work in self._queue:
                self._advance(work, 0)
                if work.state in (QUEUED, ARRIVED):           # nobody is further with what began later
                    break
            before = len(self._queue)
            while self._queue and self._queue[0].state == DONE:
                self._queue.popleft()
            if len(self._queue) < before and self._progress.landed is not None:
                self._progress.landed()
            return not self._queue
        finally:
            self._lock.release()

    def wait(self, work: SharedWork) -> None:
        """Return when the shared part of `work` is done. What began before it is summed first: others may wait for that."""
        looked = time.monotonic()
        while work.state != DONE:
            if self.cross is not None:
                self.move()                                   # a slice that has crossed goes to the node, whoever waits for what
            with self._lock:
                alone = self._progress.only(self._mover) and not any(w.state == PARTLY for w in self._queue)
                first = next((w for w in self._queue if w.state in (QUEUED, ARRIVED)), work)
                first = work if first.sequence > work.sequence else first
                before = first.state
                self._advance(first, self._limit if alone and first.state != PARTLY else 0)
            if first.state != before:
                continue
            if self.cross is not None:
                self.cross.comm.Iprobe()                      # a message that MPI holds back leaves only while MPI is called
            if not alone:
                self._progress.progress()
                os.sched_yield()                              # ranks may outnumber cores; polling must not starve the peer
            if time.monotonic() - looked > LOOK:
                self.node.check_alive(f"{work.plan.signature.text} on channel \"{self.name}\"")
                looked = time.monotonic()
        if self.move():
            self._mover.dismiss()

    def close(self) -> None:
        """Free the channels. Nothing may be in flight; the memory lives on until the node is closed."""
        if self.cross is not None:
            self.cross.close()
        self.messages.close()

    def _obstacle(self) -> str:
        """Why this cannot be shared, or nothing; the same on all ranks."""
        facts = self.messages.gather_objects([self.node.size, kernels() is not None, engine.can_poll()])
        self._native = all(native for _, native, _ in facts)
        sizes = {size for size, _, _ in facts}
        if len(sizes) > 1:
            return f"nodes have from {min(sizes)} to {max(sizes)} ranks"
        if sizes == {1} and self.size > 1:
            return "one rank on each node"
        if not self._native and not all(x86 for _, _, x86 in facts):
            return "no C compiler, and this CPU may reorder stores"
        return ""

    def _open(self) -> None:
        node = self.node
        block = node.block(Control.nbytes(node.size), self.name)
        if any(self.messages.gather_objects(block is None)):
            self.notes += node.notes or [f"{self.name}: no shared memory on another node, messages instead"]
            self.shared = False
            return
        assert block is not None
        self._control = Control(block, node.size, node.rank)
        self._engine: Engine = engine.Native(kernels()) if self._native else engine.Polling(self._control)
        if node.size < self.size:
            comm = node.base.Split(node.rank, node.base.rank)
            self.cross = Channel(comm, f"{self.name} across nodes", algorithm=self.messages.algorithm, progress=Progress(),
                                 wire=self.messages.wire)

    def _by_messages(self, array: Any, name: str, dtype: str | None) -> AnyWork:
        if dtype not in (None, array.dtype.name):
            raise ShapeError(f'{dtype} array "{name}" on channel "{self.name}" cannot go by messages; let it lie in memory of '
                             f"`allocate`" + (f" ({self.notes[-1]})" if self.notes else ""))
        return self.messages.start_allreduce(array, name)

    def _remember(self, array: Host, name: str, kind: Any, plan: Plan, flat: Host) -> Known:
        """Finding out about an array costs as much as the sum of a small one. Held on to, so that no other gets its id."""
        if len(self._known) == KNOWN:
            self._known.clear()
        known = self._known[id(array), name, kind] = Known(self._engine.whole(plan, flat, self._turn), plan, array, flat)
        return known

    def _plan(self, array: Any, address: int, name: str, dtype: str | None) -> Plan:
        """How this array goes: made once for each place in shared memory, and once for all small arrays elsewhere."""
        key = (address, array.size, dtype or array.dtype, name)
        small = (0, *key[1:])
        plan = self._plans.get(key) or self._plans.get(small)
        if plan is None:
            place, parts = self._in_window(array, address)
            plan = self._new_plan(array, address if parts else 0, name, dtype, place, parts)
            if plan.mode != MESSAGE:                          # those may lie anywhere the next time
                self._plans[key if parts else small] = plan
        return plan

    def _new_plan(self, array: Any, address: int, name: str, dtype: str | None, place: str, parts: list[Host]) -> Plan:
        """`address` is 0 for what does not lie in memory of `allocate`."""
        number_type = dtype or array.dtype.name
        if dtype is not None:
            type_name(array, dtype)                           # ShapeError for what the kernels have not
        mode = MESSAGE
        if number_type in TYPES and type(array) is np.ndarray and array.size and array.dtype.isnative:
            if self.cross is None and array.nbytes <= engine.SCRATCH_BYTES:
                mode, place = ONE_SHOT, ""                    # wherever it lies on other ranks
            elif parts and not (self.cross is not None and number_type == "bfloat16"):
                mode = TWO_SHOT if self.cross is None else PARTIAL
        if mode == MESSAGE:
            place, address = " by messages", 0
        own = slice_between_lines(address, array.itemsize, array.size, self.node.size, self.node.rank)
        return Plan(self._control, self._turn, mode, number_type, array.size, self.order,
                    Signature.of("allreduce", name + place, number_type, array.size), parts, own, address)

    def _plan_of_slice(self, array: Any, name: str, own: tuple[int, int]) -> Plan:
        if not self.shared:
            raise ShapeError(f'a sum in slices needs shared memory: {"; ".join(self.notes) or "there is one rank"}')
        address = address_of(array)
        place, parts = self._in_window(array, address)
        if not parts or array.dtype.kind != "f":
            raise ShapeError(f'"{name}" on channel "{self.name}" is {array.dtype} outside the memory of `allocate`; a sum in '
                             f"slices works on float32 or float64 inside it")
        signature = Signature.of("reduce_scatter", name + place, str(array.dtype), array.size)
        return Plan(self._control, self._turn, engine.SCATTER, array.dtype.name, array.size, self.order, signature, parts, own,
                    address)

    def _in_window(self, array: Any, address: int) -> tuple[str, list[Host]]:
        """Where every rank's array of the same place is: how a signature calls the place, and the parts; or nothing."""
        for i, window in enumerate(self._windows):
            if address and inside(window[self.node.rank], address, array.nbytes):
                offset = address - window[self.node.rank].ctypes.data
                return f" at byte {offset} of arena {i}", [part[offset:offset + array.nbytes] for part in window]
        return "", []

    def _advance(self, work: SharedWork, limit: int) -> None:
        if work.state in (DONE, PARTLY):
            self._cross(work)
            if work.state != SUMMED:
                return
        work.state = self._checked(work, self._engine.advance(work.plan, work.array, work.address, work.sequence, work.state,
                                                              self._turn.spin, limit))
        if work.state == PARTLY:
            self._cross(work)

    def _cross(self, work: SharedWork) -> None:
        """Between nodes: this rank's slice of the node's sum is summed with the other nodes', then given to the node."""
        if work.state != PARTLY:
            return
        if self.cross is not None:
            if work.crossing is None:
                start, stop = work.plan.own_slice
                work.crossing = self.cross.start_allreduce(work.array[start:stop], work.plan.signature.text)
                self.cross.progress.discard(work.crossing)    # moved here alone, under the lock: whoever calls may be a thread
            if not work.crossing.test():
                return
        work.state = self._engine.spread(work.plan, work.array, work.address, work.sequence)
        if work.then is not None:
            work.then()

    def _checked(self, work: SharedWork, state: int) -> int:
        """The state, or DesyncError where it says that another rank is in another collective."""
        if state >= 0:
            return state
        other, (number, text) = self.node.ranks[-1 - state], self._control.record(work.sequence, -1 - state)
        raise DesyncError(f'channel "{self.name}": rank {self.rank} is at shared collective {work.sequence}, '
                          f"{work.plan.signature.text}; rank {other} is at shared collective {number}, {text}; "
                          f"every rank must start the same collectives in the same order")
