"""When each bucket was ready, started and landed, and how long a step waited for it: always on, so it must cost next to nothing.

    backward      | node | node | node |                    the last local node ends: `backward_end`
    bucket 0             r s======e                         r ready: its last gradient has landed here
    bucket 1                    r  s====|===e               s start: its messages are posted, in index order
                                        |<->| exposed       e end: the sum over the ranks is here

Exposed is the time from the end of the last local backward node until the last bucket has landed. What the hooks of that last
node do (adding up micro-batches, posting messages) counts as exposed. All times are seconds of `time.perf_counter`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, Protocol

KEPT = 100                                # Steps; 100 steps with 50 buckets take half a megabyte.


class Movable(Protocol):
    @property
    def done(self) -> bool: ...


@dataclass(frozen=True)
class StepTimes:
    """One step; the lists are in bucket order, and `start` and `end` are empty where there was nobody to exchange with.

    `events` has a device's of each bucket, where somebody asked for them: it was written, its messages could begin, it was back.
    """

    ready: list[float]
    start: list[float]
    end: list[float]
    backward_end: float
    events: Sequence[Sequence[Any]] = ()

    @property
    def exposed_s(self) -> float:
        return max(0.0, max(self.end) - self.backward_end) if self.end else 0.0

    def exposed_by_bucket(self) -> list[float]:
        """Each bucket's part of `exposed_s`: by how much it landed later than backward and all buckets before it."""
        parts, reached = [], self.backward_end
        for end in self.end:
            parts.append(max(0.0, end - reached))
            reached = max(reached, end)
        return parts


class Timeline:
    """The times of the last `KEPT` steps, oldest first, in `steps`; the reducer fills them in."""

    def __init__(self) -> None:
        self.steps: deque[StepTimes] = deque(maxlen=KEPT)
        self.parameters: dict[str, float] | None = None       # A dict takes the times at which gradients are final.
        self.listener: SpanMaker = no_span                    # Whoever gets the spans from now on.
        self.heard: Callable[[str, str], None] = lambda row, name: None       # It is told of each span that begins.
        self.landed: Callable[[], None] = lambda: None        # Called when what is asked for next has a step's summed gradients.
        self.keeps_events = False                             # Whether `steps` have events of a device.
        self._node = self._node_before = self._last_ready = 0.0
        self._ready: list[float] = []
        self._start: list[float] = []
        self._end: list[float] = []
        self._works: list[Movable] = []
        self._landed = 0                                      # So many of the first buckets have landed for certain.

    def span(self, row: str, name: str) -> AbstractContextManager[None]:
        """The context of something that takes time: ``with timeline.span("compute", "forward 0"): ...``."""
        self.heard(row, name)
        return self.listener(row, name)

    def listen(self, spans: SpanMaker) -> None:
        """Gives the spans from now on to `spans`, beside whoever gets them already."""
        before = self.listener
        self.listener = spans if before is no_span else lambda row, name: Both(before(row, name), spans(row, name))

    def when_landed(self, action: Callable[[], None]) -> None:
        """Calls `action` where a step's gradients are summed, after whoever is called already."""
        before = self.landed

        def both() -> None:
            before()
            action()
        self.landed = both

    def begin(self, n_buckets: int) -> None:
        self._ready, self._start, self._end = [0.0] * n_buckets, [0.0] * n_buckets, [0.0] * n_buckets
        self._works, self._landed = [], 0
        self._node = self._node_before = self._last_ready = 0.0

    def node_passed(self) -> None:
        """A node of backward has ended. Called between any two of them."""
        self._node_before, self._node = self._node, perf_counter()

    def parameter_ready(self, name: str) -> None:
        if self.parameters is not None:
            self.parameters[name] = perf_counter()

    def ready(self, index: int) -> None:
        self._ready[index] = self._last_ready = perf_counter()

    def started(self, index: int, work: Movable, began: float) -> None:
        """The first messages of a bucket were posted, from `began` on; the buckets come in index order."""
        self._start[index] = began
        self._ready[index] = self._ready[index] or began
        self._works.append(work)
        if work.done:
            self.look()

    def look(self) -> None:
        """Notes the end of buckets that have landed; called by whoever moves messages when a collective is complete.

        Two threads may be in here at once: an end is set once, and `_landed` never passes a bucket without one.
        """
        now, landed, works = perf_counter(), self._landed, self._works
        for index in range(landed, len(works)):
            if not self._end[index] and works[index].done:
                self._end[index] = now
        while landed < len(works) and self._end[landed]:
            landed += 1
        self._landed = landed

    def finish(self, called: float) -> StepTimes:
        """All buckets have landed; `called` is when the reducer was told that backward is over."""
        self.look()
        ended = self._node or called
        if self._last_ready > self._node_before:              # The last node gave a gradient: its hooks are exchange.
            ended = min(ended, self._last_ready)
        exchanged = bool(self._works)
        events = [getattr(work, "events", ()) for work in self._works] if self.keeps_events else ()
        times = StepTimes(self._ready, self._start if exchanged else [], self._end if exchanged else [], ended, events)
        self._works = []
        self.landed()
        self.heard("optimizer", "update")
        self.steps.append(times)
        return times


class Span(NamedTuple):
    """Something that took from `began` to `ended`, drawn on `row`."""

    row: str
    name: str
    began: float
    ended: float


class Both:
    """Two contexts as one."""

    def __init__(self, outer: AbstractContextManager[None], inner: AbstractContextManager[None]):
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


SpanMaker = Callable[[str, str], AbstractContextManager[None]]
_NOTHING = nullcontext()


def no_span(row: str, name: str) -> AbstractContextManager[None]:
    """The span maker while nobody listens."""
    return _NOTHING


class Spans:
    """Records spans in groups of one step, from any thread: ``with spans("compute", "forward 0"): ...``.

    A span on the row `STEP` begins a group; the last `KEPT` groups are kept, in `groups`.
    """

    STEP = "step"

    def __init__(self) -> None:
        self.groups: deque[list[Span]] = deque([[]], maxlen=KEPT)

    @contextmanager
    def __call__(self, row: str, name: str) -> Iterator[None]:
        if row == self.STEP:
            self.groups.append([])
        group, began = self.groups[-1], perf_counter()
        try:
            yield
        finally:
            group.append(Span(row, name, began, perf_counter()))
