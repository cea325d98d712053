"""Progress of messages: Open MPI makes progress only inside MPI calls, so somebody must call it while others compute.

`Progress` is the `poll` policy: the engine calls `progress()` between backward nodes. On one node, 8 MB in flight during 20 ms
of compute: left alone, 1.0 to 1.6 ms of the exchange remain exposed afterwards; polled about once a millisecond, none does.

`ProgressThread` is the `thread` policy: works that are handed over to it are moved by a thread of its own while the program
computes. It pays where cores are left over or single nodes of backward take long; it costs where every core computes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from mpitrain.backend import use_pool
from mpitrain.errors import ConfigError

PERIOD_S = 100e-6     # the thread's pause between looks: a round of a ring waits half of it on average
AWAKE, NAP = 3e-4, 5e-5  # seconds: a rank of a crowded host looks for so long before it sleeps, and sleeps so long between looks


class InFlight(NamedTuple):
    """One collective, or message, that has begun, at `time.monotonic`, and not ended.

    `peers` are the ranks of its channel that it waits for, as far as known.
    """

    what: str
    channel: str
    began: float
    peers: tuple[int, ...]


class Movable(Protocol):
    """A `PolledWork`, or a queue of works, that can be in flight."""

    @property
    def done(self) -> bool: ...
    def test(self) -> bool: ...


M = TypeVar("M", bound=Movable)


class Progress:
    """Everything in flight, oldest first; one object for all channels that compute together.

    `landed`, where set, is called whenever something is complete.
    """

    def __init__(self) -> None:
        self._works: list[Movable] = []
        self.landed: Callable[[], None] | None = None
        self.crowded = False                                  # whether the ranks of this host outnumber its cores
        self._thread: ProgressThread | None = None
        self._blocking: list[Callable[[], list[InFlight]]] = []

    def in_flight(self) -> list[InFlight]:
        """All that has begun and not ended, oldest first, for a watcher in another thread; free until asked."""
        works = [*self._works, *(map(_moved, self._thread.owned) if self._thread is not None else ())]
        asks: list[Any] = [getattr(work, "in_flight", list) for work in works]
        found = [one for ask in (*asks, *self._blocking) for one in ask()]
        return sorted(found, key=lambda one: one.began)

    def watch(self, ask: Callable[[], list[InFlight]]) -> None:
        """Let `in_flight` call `ask`, which tells of calls that block without being added here."""
        self._blocking.append(ask)

    @property
    def watched(self) -> int:
        """The number of such functions."""
        return len(self._blocking)

    def forget(self, since: int) -> None:
        """Asks only the first `since` of them from now on, and tells nobody what has landed: the others' channels are freed."""
        del self._blocking[since:]
        self.landed = None

    def __len__(self) -> int:
        return len(self._works)

    def add(self, work: Movable) -> None:
        if not work.done:
            self._works.append(work)

    def added(self, work: M) -> M:
        """The work itself, which is in flight from now on."""
        self.add(work)
        return work

    def discard(self, work: Movable) -> None:
        if work in self._works:
            self._works.remove(work)
            if work.done and self.landed is not None:
                self.landed()

    def only(self, work: Movable) -> bool:
        """Whether nothing but `work` is in flight, so that blocking on it delays no other work."""
        return not self._works or (len(self._works) == 1 and self._works[0] is work)

    def thread(self) -> ProgressThread:
        """The one thread that moves the works handed over to it; started at the first call."""
        if self._thread is None:
            self._thread = ProgressThread(self)
        return self._thread

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def progress(self) -> None:
        """Move everything in flight as far as its messages have landed; returns at once when there is nothing."""
        if self._works:
            before = len(self._works)
            self._works = [work for work in self._works if not work.test()]
            if len(self._works) < before and self.landed is not None:
                self.landed()


    def pause(self, began: float) -> None:
        """Gives the core away between two looks at what has been awaited since `began` (of time.monotonic).

        On a crowded host a rank that waits for long sleeps a little. One that only gives its core away is, to the scheduler, one
        that runs, which leaves ranks where they are: two that compute may share a core while two that look have another. Four
        stages on two cores took 36 to 58 ms a step, as it happened, and take 41 to 42.
        """
        if self.crowded and time.monotonic() - began > AWAKE:
            time.sleep(NAP)
        else:
            os.sched_yield()


def _moved(work: Movable) -> Movable:
    """The work that `Progress` holds for `work`: its `inner` one where there is one, which two threads must not move either."""
    inner: Movable | None = getattr(work, "inner", None)
    return work if inner is None else inner


def threads_may_call_mpi() -> bool:
    """Whether MPI was started so that several threads may call it at once."""
    from mpi4py import MPI
    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


class ProgressThread:
    """Moves the works that `hand_over` gives it, until `take_back` returns them to `progress`.

        hook of a bucket        with thread.lock: work = channel.start_allreduce(...)
                                thread.hand_over(work)            now the thread alone may touch this work
        end of backward         thread.take_back()                it has stopped; works may be waited for as usual

    A work has one owner at any time, so works need no locks of their own. `lock` is held by the thread while it moves works and
    by whoever starts one on the same channel, whose buffers and counters both use. Works of other channels are never touched
    here, and MPI itself is entered by two threads at once: ConfigError where it was not started for that. Nothing blocks while
    holding the lock, so the thread cannot be part of a deadlock.

    An exception in the thread ends the job like one anywhere else (`guard`); where nobody does that, `take_back` raises it.
    """

    def __init__(self, progress: Progress):
        if not threads_may_call_mpi():
            raise ConfigError('comm.progress = "thread" needs an MPI that several threads may call at once '
                              '(MPI_THREAD_MULTIPLE), which this one does not allow; set comm.progress = "poll"')
        self._progress = progress
        self.lock = threading.Lock()
        self.owned: list[Movable] = []
        self._wake, self._end = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mpitrain-progress", daemon=True)
        self._thread.start()

    def hand_over(self, work: Movable) -> None:
        if work.done:
            return
        self._progress.discard(_moved(work))
        with self.lock:
            self.owned.append(work)
        self._wake.set()

    def take_back(self) -> None:
        """Return when the thread is idle and owns nothing. Raises the exception that ended it."""
        self._wake.clear()
        with self.lock:                                       # the thread is in no work now, and finds none afterwards
            works, self.owned = self.owned, []
        if self._error is not None:
            raise self._error
        for work in works:
            self._progress.add(_moved(work))

    def close(self) -> None:
        """End the thread; nothing may be handed over."""
        with self.lock:                                       # the thread clears `_wake` under it, unless this came first
            self._end.set()
            self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        use_pool()
        while True:
            self._wake.wait()
            if self._end.wait(PERIOD_S):
                return
            with self.lock:
                if self._end.is_set():
                    return
                try:
                    self._move()
                except BaseException as error:
                    self._error = error
                    raise                                     # threading.excepthook gets it and ends the job

    def _move(self) -> None:
        left = [work for work in self.owned if not work.test()]
        if len(left) < len(self.owned) and self._progress.landed is not None:
            self._progress.landed()
        self.owned = left
        if not left:
            self._wake.clear()
