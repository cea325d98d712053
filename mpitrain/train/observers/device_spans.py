"""Spans of a run on a GPU in the time of the GPU: the host only launches work, and is elsewhere when it is done.

    host     [forward 0][backward 0][update]   ...                           times of launches
    device         *[ forward 0        ]*[ backward 0       ]*[ update  ]    *: events that the stream passes

An event is recorded where a span begins and ends, which costs a microsecond or two and waits for nothing. Their times are read
when the trace is written: each step's first event after that of the step before, the last one by the host's clock. The same holds
for buckets that streams of their own take to the host and back, or NCCL adds up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from mpitrain.backend import Device
from mpitrain.parallel.gradients.timeline import KEPT, Span, Spans, StepTimes
from mpitrain.train.trainer import UPDATE

WORK = ("compute", "optimizer", "evaluation")                 # rows of what a device does
LAUNCHES = "launches"                                         # the row of the host's part in it


class Passed(NamedTuple):
    """A span between two events of the device."""

    row: str
    name: str
    began: Any
    ended: Any


@dataclass
class Group:
    """What was recorded since a step began: from its first event on, so that no difference is negative."""

    first: Any = None
    passed: list[Passed] = field(default_factory=list)
    landed: Any = None                                        # where gradients were summed, for the last time


class DeviceSpans(Spans):
    """Records spans of the host as ever and, of those in `WORK` and of steps, when the device's stream passes their ends.

    Those of other threads, which read data, are the host's alone.
    """

    def __init__(self, device: Device):
        super().__init__()
        self._cuda, self._thread = device.xp.cuda, threading.get_ident()
        self.passed: deque[Group] = deque([Group()], maxlen=KEPT)            # of the same steps as `groups`

    @contextmanager
    def __call__(self, row: str, name: str) -> Iterator[None]:
        with super().__call__(row, name):
            if row not in (self.STEP, *WORK) or threading.get_ident() != self._thread:
                yield
                return
            if row == self.STEP:
                self.passed.append(Group())
            group, began = self.passed[-1], self._event()
            group.first = began if group.first is None else group.first
            try:
                yield
            finally:
                group.passed.append(Passed(row, name, began, self._event()))

    def landed(self) -> None:
        """What the device is asked for from now on has the summed gradients of the step."""
        self.passed[-1].landed = self._event()

    def _event(self) -> Any:
        event = self._cuda.Event()
        event.record()
        return event

    def on_device(self) -> list[Span]:
        """The spans in seconds of the host's clock, oldest first; the update of a step is cut where gradients had landed. Waits
        for the device."""
        return [part for group, zero in zip(self.passed, self._zeros()) for span in group.passed
                for part in self._parts(span, group, zero)]

    def in_its_time(self, steps: Sequence[StepTimes | None]) -> list[StepTimes | None]:
        """The times of buckets in the steps of `groups`, as far as there are events of them. Waits for the device."""
        return [times if times is None or not times.events or group.first is None else self._placed(times, group, zero)
                for times, group, zero in zip(steps, self.passed, self._zeros())]

    def _placed(self, times: StepTimes, group: Group, zero: float) -> StepTimes:
        buckets = list(zip(times.ready, times.start, times.end))
        for i, events in enumerate(times.events):
            if len(events) == 3:                              # Small buckets of two ranks are the host's.
                written, here, back = (zero + self._between(group.first, event) for event in events)
                buckets[i] = written, here, back
        ended = [zero + self._between(group.first, span.ended) for span in group.passed if "backward" in span.name]
        ready, start, end = ([bucket[k] for bucket in buckets] for k in range(3))
        return StepTimes(ready, start, end, max(ended, default=times.backward_end))

    def _zeros(self) -> list[float]:
        """When the first event of each group passed, by the host's clock; 0 for a group without one."""
        last = self._event()
        last.synchronize()
        now, following, found = perf_counter(), last, list[float]()
        for group in reversed(self.passed):
            if group.first is not None:
                now -= self._between(group.first, following)
                following = group.first
            found.append(0.0 if group.first is None else now)
        return found[::-1]

    def _parts(self, passed: Passed, group: Group, zero: float) -> Iterator[Span]:
        """The span, or parts of it, of a group whose first event was at `zero`."""
        began, ended = (zero + self._between(group.first, event) for event in (passed.began, passed.ended))
        if passed.name == UPDATE and group.landed is not None:
            landed = min(max(began, zero + self._between(group.first, group.landed)), ended)
            yield Span("compute", "wait for gradients", began, landed)
            yield Span("optimizer", "update", landed, ended)
        else:
            yield Span("compute" if passed.row == self.STEP else passed.row, passed.name, began, ended)

    def _between(self, first: Any, second: Any) -> float:
        """Seconds between two events; CUDA has them in float32, so they are asked for within a step or to the next one."""
        return float(self._cuda.get_elapsed_time(first, second)) / 1e3


def launches(spans: list[Span]) -> list[Span]:
    """The host's spans, of which those that are work of the device go to a row of their own."""
    return [span._replace(row=LAUNCHES) if span.row in WORK else span for span in spans]
