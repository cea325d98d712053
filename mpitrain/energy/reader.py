"""The one reader of a host's energy counters: a thread that looks now and then, and adds up what each phase of a step took.

No process: nothing forks once MPI has started. A reading takes some tens of microseconds, and the thread sleeps between two.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mpitrain.energy.phases import PowerFit
from mpitrain.energy.zones import Lost


class Counter(Protocol):
    """Joules of a host or a device since it was made, never less than before."""

    @property
    def kind(self) -> str: ...
    @property
    def measured(self) -> bool: ...
    @property
    def lag_s(self) -> float:
        """By how many seconds its number is old, on average."""
    def joules(self) -> float:
        """Lost where they are not known any more."""
    def parts(self) -> dict[str, float]:
        """What has used them, at the last reading, by name."""
    def close(self) -> None: ...


class Several:
    """Counters of different things, added up: processors and GPUs."""

    def __init__(self, counters: Sequence[Counter]):
        self.counters = list(counters)

    @property
    def kind(self) -> str:
        return ", ".join(counter.kind for counter in self.counters)

    @property
    def measured(self) -> bool:
        return all(counter.measured for counter in self.counters)

    @property
    def lag_s(self) -> float:
        return self.counters[0].lag_s

    def joules(self) -> float:
        return sum(counter.joules() for counter in self.counters)

    def parts(self) -> dict[str, float]:
        return {name: joules for counter in self.counters for name, joules in counter.parts().items()}

    def close(self) -> None:
        for counter in self.counters:
            counter.close()


class Reader:
    """Reads a counter every `period_s`, and whenever it is asked.

    `phases(lag)` gives the seconds of each of `n_phases` phases until so long ago, added up over the ranks of the host, or None
    in the moment in which a rank changes its phase. `why` says why the joules are unknown, "" while they are known; `known` is
    their number at the last good reading, `seconds` after the start.
    """

    def __init__(self, counter: Counter, period_s: float, phases: Callable[[float], Sequence[float] | None], n_phases: int,
                 clock: Callable[[], float] = time.monotonic):
        self.counter, self.period_s, self._phases, self._clock = counter, period_s, phases, clock
        self.fit = PowerFit(n_phases)
        self.why = ""
        self.known = self.seconds = 0.0
        self.samples = 0
        self._error: BaseException | None = None
        self._lock, self._runs = threading.Lock(), threading.Lock()       # `_runs` is held until the thread is to end
        self._thread: threading.Thread | None = None
        self._runs.acquire()
        self._began, self._base = clock(), 0.0
        self._before: tuple[float, Sequence[float]] | None = None      # joules and phase seconds of the last sample

    def start(self) -> None:
        """From here on joules and seconds are counted, and the thread reads."""
        if self.joules() is not None:
            self._began, self._base = self._clock(), self.known
            self.known = self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="energy", daemon=True)
        self._thread.start()

    def joules(self) -> float | None:
        """Joules since the start; None: unknown. An error of the thread that nobody expected is raised here."""
        if self._error is not None:
            raise self._error
        with self._lock:
            return self._read()

    def sample(self) -> None:
        """What the thread does each time: a reading, and what the phases took since the one before."""
        with self._lock:
            joules, phases = self._read(), self._phases(self.counter.lag_s)
            if joules is None or phases is None:
                return
            if self._before is not None:
                self.fit.add([now - then for now, then in zip(phases, self._before[1])], joules - self._before[0])
            self._before = joules, phases
            self.samples += 1

    def stop(self) -> None:
        """Ends the thread and closes the counter; once."""
        if self._thread is not None:
            self._runs.release()
            self._thread.join()
            self._thread = None
        self.counter.close()

    def _read(self) -> float | None:
        if self.why:
            return None
        try:
            self.known = self.counter.joules() - self._base
            self.seconds = self._clock() - self._began
        except Lost as error:
            self.why = str(error)
            return None
        return self.known

    def _run(self) -> None:
        due = self._clock()
        while not self._runs.acquire(timeout=max(0.0, due - self._clock())):        # a lock wakes up in half the time of an Event
            try:
                self.sample()
            except BaseException as error:                     # noqa: BLE001  raised in the run's own thread, at its next look
                self._error = error
                return
            due = max(due + self.period_s, self._clock())      # a job that was stopped for a while makes up for nothing
