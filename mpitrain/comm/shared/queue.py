"""The collectives in flight on a shared channel, and their queue, which `Progress` sees as one work."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from mpitrain.comm.messages.buffers import Host
from mpitrain.comm.messages.progress import InFlight
from mpitrain.comm.shared.engine import ARRIVED, DONE, PARTLY, QUEUED, SUMMED, Control, Engine, Plan, Turn
from mpitrain.errors import DesyncError

if TYPE_CHECKING:
    from mpitrain.comm.messages.channel import Channel
    from mpitrain.comm.shared.node import Node
    from mpitrain.comm.work import Work

Across: TypeAlias = "Callable[[Host, str], Work]"     # begins the sum over nodes of a slice, in place; the text says which
LIMIT = 100_000_000                   # ns that a call to C takes at most; then signals, other messages, and a look at the time
LIMIT_CROSSING = 1_000_000            # ns, where messages to other nodes must move meanwhile
LOOK = 0.25                           # s of waiting before a look whether the others live, and between looks


class SharedWork:
    """A collective in shared memory on its way; `comm.work.Work`. `inner` is the work of an array that goes by messages, which
    `Progress` moves as one of its own as well."""

    __slots__ = ("across", "array", "began", "crossing", "inner", "plan", "queue", "sequence", "state", "then")

    def __init__(self, queue: Queue, plan: Plan, array: Host, sequence: int, inner: Work | None = None,
                 then: Callable[[], None] | None = None, across: Across | None = None):
        self.queue, self.plan, self.array, self.sequence = queue, plan, array, sequence
        self.state, self.inner, self.then, self.across = QUEUED, inner, then, across
        self.crossing: Any = None
        self.began = time.monotonic()

    @property
    def done(self) -> bool:
        return self.state == DONE and (self.inner is None or self.inner.done)

    def test(self) -> bool:
        """Whether the result is there, after moving on as far as the others have come. Never blocks."""
        if self.state != DONE:
            self.queue.test()
        return self.state == DONE and (self.inner is None or self.inner.test())

    def wait(self) -> None:
        """Return when the result is there; moves everything else in flight meanwhile."""
        if self.state != DONE:
            self.queue.wait(self)
        if self.inner is not None:
            self.inner.wait()
        self.queue.node.progress.discard(self)                # `ProgressThread.take_back` may have added it


class Queue:
    """The collectives of one channel in the order of their start, which is the same on all ranks. `Progress` sees one work.

    `cross` connects the ranks of the same number on all nodes, where there are several.
    """

    def __init__(self, channel: str, node: Node, control: Control, engine: Engine, turn: Turn, cross: Channel | None):
        self.channel, self.node, self.cross, self.done = channel, node, cross, True
        self._control, self._engine, self._turn = control, engine, turn
        self._limit = LIMIT if cross is None else LIMIT_CROSSING
        self._works: deque[SharedWork] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._works)

    def begin(self, plan: Plan, array: Host, messages: Work | None = None, then: Callable[[], None] | None = None,
              across: Across | None = None) -> SharedWork:
        """Start the next collective. `then` is called once, when this rank's slice is summed; `across` sums it with those of
        other nodes (default: by an all-reduce of `cross`)."""
        with self._lock:
            work = SharedWork(self, plan, array, self._turn.sequence, messages, then, across)
            self._turn.sequence += 1
            waiting = self._works and self._works[-1].state in (QUEUED, ARRIVED)
            self._advance(work, -1 if waiting and self.cross is not None else 0)    # other nodes need the order of starts
            if work.state != DONE:
                self._append(work)
        return work

    def take_up(self, plan: Plan, array: Host, state: int) -> SharedWork:
        """The work in flight of a collective that one call could not end, for the others were not there in time."""
        with self._lock:
            work = SharedWork(self, plan, array, plan.taken)
            work.state = self._checked(work, state)
            self._append(work)
        return work

    def test(self) -> bool:
        """Whether nothing is in flight, after moving everything as far as the others have come. Never blocks."""
        if not self._lock.acquire(blocking=False):
            return False                                      # another thread moves the queue
        try:
            for work in self._works:
                self._advance(work, 0)
                if work.state in (QUEUED, ARRIVED):           # no later collective is further
                    break
            before = len(self._works)
            while self._works and self._works[0].state == DONE:
                self._works.popleft()
            if len(self._works) < before and self.node.progress.landed is not None:
                self.node.progress.landed()
            self.done = not self._works
            return self.done
        finally:
            self._lock.release()

    def wait(self, work: SharedWork) -> None:
        """Return when the shared part of `work` is done. Earlier collectives are summed first: others may wait for them."""
        progress, looked = self.node.progress, time.monotonic()
        while work.state != DONE:
            if self.cross is not None:
                self.test()                                   # slices that have crossed go to the node, whatever is waited for
            with self._lock:
                alone = progress.only(self) and not any(w.state == PARTLY for w in self._works)
                first = next((w for w in self._works if w.state in (QUEUED, ARRIVED)), work)
                first = work if first.sequence > work.sequence else first
                before = first.state
                self._advance(first, self._limit if alone and first.state != PARTLY else 0)
            if first.state != before:
                continue
            if self.cross is not None:
                self.cross.comm.Iprobe()                      # a message that MPI holds back leaves only while MPI is called
            if not alone:
                progress.progress()
                os.sched_yield()                              # ranks may outnumber cores; polling must not starve the peer
            if time.monotonic() - looked > LOOK:
                self.node.check_alive(f"{work.plan.signature.text} on channel \"{self.channel}\"")
                looked = time.monotonic()
        if self.test():
            progress.discard(self)

    def in_flight(self) -> list[InFlight]:
        """Each collective, with the ranks of the node that have not published its record."""
        return [InFlight(work.plan.signature.text, self.channel, work.began, tuple(
                    rank for i, rank in enumerate(self.node.ranks) if not self._has_begun(work.sequence, i)))
                for work in list(self._works)]

    def _has_begun(self, sequence: int, rank: int) -> bool:
        number, text = self._control.record(sequence, rank)
        return number == sequence and bool(text)              # an unused record holds number 0, as the first collective does

    def _append(self, work: SharedWork) -> None:
        self._works.append(work)
        if self.done:
            self.done = False
            self.node.progress.add(self)

    def _advance(self, work: SharedWork, limit: int) -> None:
        if work.state in (DONE, PARTLY):
            self._cross(work)
            if work.state != SUMMED:
                return
        work.state = self._checked(work, self._engine.advance(work.plan, work.array, work.sequence, work.state, self._turn.spin,
                                                              limit))
        if work.state == PARTLY:
            self._cross(work)

    def _cross(self, work: SharedWork) -> None:
        """This rank's slice of the node's sum is summed with the other nodes', then given to all ranks of the node."""
        if work.state != PARTLY:
            return
        if self.cross is not None:
            if work.crossing is None:
                start, stop = work.plan.own_slice
                across = work.across or self.cross.start_allreduce
                work.crossing = across(work.array[start:stop], work.plan.signature.text)
                self.cross.progress.discard(work.crossing)    # it is moved here alone, under the lock, perhaps by a thread
            if not work.crossing.test():
                return
        work.state = self._engine.spread(work.plan, work.array, work.sequence)
        if work.then is not None:
            work.then()

    def _checked(self, work: SharedWork, state: int) -> int:
        """The state; DesyncError where it says that another rank is in another collective."""
        if state >= 0:
            return state
        node = self.node
        other, (number, text) = node.ranks[-1 - state], self._control.record(work.sequence, -1 - state)
        raise DesyncError(f'channel "{self.channel}": rank {node.base.rank} is at shared collective {work.sequence}, '
                          f"{work.plan.signature.text}; rank {other} is at shared collective {number}, {text}; "
                          f"every rank must start the same collectives in the same order")


class SharedSum:
    """A sum over one array in shared memory, prepared: `comm.work.Collective`."""

    __slots__ = ("_across", "_array", "_messages", "_plan", "_queue", "_then", "_whole")

    def __init__(self, queue: Queue, engine: Engine, turn: Turn, plan: Plan, array: Host,
                 messages: Callable[[], Work] | None = None, then: Callable[[], None] | None = None,
                 across: Across | None = None):
        self._queue, self._plan, self._array, self._messages, self._then = queue, plan, array, messages, then
        self._across = across
        self._whole = None if messages or then or across else engine.whole(plan, array, turn)

    def start(self) -> SharedWork:
        messages = None if self._messages is None else self._messages()
        return self._queue.begin(self._plan, self._array, messages, self._then, self._across)

    def run(self) -> None:
        """`start` and `wait`, in one call where the other ranks are there in time."""
        if self._whole is None or self._queue:
            self.start().wait()
            return
        state = self._whole()                                 # no lock is needed: nothing of this channel is in flight
        if state != DONE:
            self._queue.take_up(self._plan, self._array, state).wait()


class SliceSum(SharedSum):
    """A reduce-scatter in shared memory: each rank keeps its slice of the sum."""

    __slots__ = ()

    def start(self, passes: Any = None) -> SharedWork:
        """Begin. C applies `passes` (a ctypes array of `engine.Pass`) to the summed slice, block by block."""
        self._plan.follow(passes)
        return super().start()
