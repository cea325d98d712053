"""When buckets were ready, started and landed, on a clock that only moves when told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import numpy as np
import pytest
from test_reducer import give, storage_of

from mpitrain.comm.messages.prepare import Prepared
from mpitrain.parallel.gradients import timeline as module
from mpitrain.parallel.gradients.bucket_sum import AllReduce
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.timeline import KEPT, StepTimes, Timeline


class Clock:
    def __init__(self):
        self.now = 1.0

    def __call__(self):
        return self.now


class Work:
    """In flight until `done` is set; waiting for it takes `seconds` of the clock."""

    def __init__(self, clock, seconds=0.0, done=False):
        self.clock, self.seconds, self.done = clock, seconds, done

    def test(self):
        return self.done

    def wait(self):
        if not self.done:
            self.clock.now += self.seconds
            self.done = True


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "perf_counter", made)
    monkeypatch.setattr("mpitrain.parallel.gradients.reducer.time.perf_counter", made)
    return made


def test_exposed_is_from_the_last_node_to_the_last_bucket(clock):
    times = Timeline()
    first, second = Work(clock), Work(clock)
    times.begin(2)
    for now, action in ((2, lambda: times.ready(0)), (2.5, lambda: times.started(0, first, 2.25)), (3, times.node_passed),
                        (4, times.node_passed), (5, lambda: times.ready(1)), (5.5, lambda: times.started(1, second, 5.25))):
        clock.now = now
        action()
    clock.now, first.done = 6, True
    times.look()                                          # during the hooks of the last node: already exposed
    clock.now = 7
    times.node_passed()
    clock.now, second.done = 9, True
    found = times.finish(called=8.0)
    assert found == StepTimes(ready=[2, 5], start=[2.25, 5.25], end=[6, 9], backward_end=5)
    assert found.exposed_s == 4 and found.exposed_by_bucket() == [1, 3]


def test_a_node_after_the_last_gradient_still_hides_the_exchange(clock):
    times = Timeline()
    times.begin(1)
    work = Work(clock)
    times.ready(0)
    times.started(0, work, clock.now)
    for now in (2, 3):                                    # the node of the gradient, and one more
        clock.now = now
        times.node_passed()
    clock.now, work.done = 3.5, True
    assert times.finish(called=4.0).exposed_s == 0.5


def test_what_lands_before_backward_ends_is_not_exposed(clock):
    times = Timeline()
    times.begin(1)
    work = Work(clock, done=True)
    times.ready(0)
    times.started(0, work, clock.now)
    for now in (2, 3):
        clock.now = now
        times.node_passed()
    found = times.finish(called=4.0)
    assert found.end == [1.0] and found.exposed_s == 0 and found.exposed_by_bucket() == [0]


def test_only_the_last_steps_are_kept():
    times = Timeline()
    for _ in range(KEPT + 5):
        times.begin(0)
        times.finish(called=0.0)
    assert len(times.steps) == KEPT


class Channel:
    size = 2

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def prepare(self, array, name):
        return Prepared(lambda: self.start_allreduce(array, name))

    def start_allreduce(self, array, name):
        self.clock.now += 0.25                            # posting takes time
        return Work(self.clock, self.seconds)


def test_the_reducer_writes_down_every_bucket_of_every_step(clock):
    storage = storage_of(4, 4, 4)
    reducer = GradientReducer(storage, AllReduce(Channel(clock, seconds=2.0)), bucket_bytes=1)
    for _ in range(2):
        reducer.begin()
        reducer.begin_micro_batch(last=True)
        give(storage, {0: np.ones(4), 2: np.ones(4)})     # the middle one takes no part, so its bucket and the first are late
        began = clock.now
        reducer.finish()
        times = reducer.timeline.steps[-1]
        assert times.start == [began - 0.25, began, began + 0.25]
        assert times.ready == [began - 0.25, began, began]
        assert times.end == [began + 2.5, began + 4.5, began + 6.5]
        assert reducer.exposed_s == times.exposed_s > 6
    assert len(reducer.timeline.steps) == 2


def test_a_rank_alone_exposes_nothing(clock):
    storage = storage_of(4)
    channel = Channel(clock, seconds=2.0)
    channel.size = 1
    reducer = GradientReducer(storage, AllReduce(channel), bucket_bytes=1)
    reducer.begin()
    reducer.begin_micro_batch(last=True)
    give(storage, {0: np.ones(4)})
    reducer.finish()
    assert reducer.exposed_s == 0 and reducer.timeline.steps[-1].start == []


def test_other_bounds_make_other_buckets_and_the_same_sums(clock):
    storage = storage_of(4, 3, 2, 5)
    reducer = GradientReducer(storage, AllReduce(Channel(clock, seconds=0.0)), bucket_bytes=1 << 20)
    sums = []
    for bounds in (None, [1, 4], [1, 2, 3, 4]):
        if bounds:
            reducer.cut(bounds)
            assert [len(bucket.segments) for bucket in reducer.buckets] == list(np.diff([0, *bounds]))
            assert reducer.buckets[0].stop == storage.size and reducer.buckets[-1].start == 0
        reducer.begin()
        for last in (False, True):
            reducer.begin_micro_batch(last=last)
            give(storage, {i: np.full(n, i + 1.0 + last) for i, n in enumerate((4, 3, 2, 5))})
        sums.append(reducer.finish().copy())
    assert all((found == sums[0]).all() and found.any() for found in sums)


def test_several_listeners_get_each_span_in_one_order_and_all_hear_when_gradients_have_landed() -> None:
    timeline, said = Timeline(), list[str]()

    def listener(who: str) -> Callable[[str, str], AbstractContextManager[None]]:
        @contextmanager
        def spans(row: str, name: str) -> Iterator[None]:
            said.append(f"{who} enters {row} {name}")
            yield
            said.append(f"{who} leaves")
        return spans
    for who in ("first", "second"):
        timeline.listen(listener(who))
        timeline.when_landed(partial(said.append, f"{who} hears"))
    with timeline.span("compute", "forward 0"):
        said.append("forward")
    assert said == ["first enters compute forward 0", "second enters compute forward 0", "forward", "second leaves",
                    "first leaves"]
    timeline.begin(1)
    timeline.finish(0.0)
    assert said[5:] == ["first hears", "second hears"]
