"""Bucket bounds against trying all of them, the line through timed messages, and when a choice is made."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_reducer import give, storage_of
from test_timeline import Channel, Clock

from mpitrain.errors import CheckpointError
from mpitrain.parallel.gradients.bucket_sum import AllReduce, TreeSum
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.tuning import PAIRS, PROBES, READY_STEPS, WARM_STEPS, Tuning, choose_bounds, fit_line
from mpitrain.schedules.microtree import RankTree


def landed(bounds, ready, nbytes, alpha, beta):
    """When the last bucket lands, by walking through them."""
    now, first = float("-inf"), 0
    for last in bounds:
        now = max(now, max(ready[:last])) + alpha + beta * sum(nbytes[first:last])
        first = last
    return now


def every_cut(m):
    for count in range(m):
        for inner in combinations(range(1, m), count):
            yield [*inner, m]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=8), st.integers(0, 20), st.integers(0, 3))
def test_no_other_cut_lands_earlier_and_none_as_early_has_fewer_buckets(gradients, alpha, beta):
    ready, nbytes = zip(*gradients)
    bounds = choose_bounds(ready, nbytes, alpha, beta)
    found = landed(bounds, ready, nbytes, alpha, beta)
    every = [(landed(cut, ready, nbytes, alpha, beta), len(cut)) for cut in every_cut(len(ready))]
    assert (found, len(bounds)) == min(every)


def test_latency_alone_makes_one_bucket_and_bandwidth_alone_sends_at_once():
    ready, nbytes = [1.0, 2.0, 3.0], [100, 100, 100]
    assert choose_bounds(ready, nbytes, alpha=10.0, beta=0.0) == [3]
    assert choose_bounds(ready, nbytes, alpha=0.0, beta=0.01) == [1, 2, 3]
    assert choose_bounds([], [], alpha=1.0, beta=1.0) == []


def test_hundreds_of_gradients_take_no_time_to_speak_of():
    rng = np.random.default_rng(0)
    ready, nbytes = np.sort(rng.random(400)), rng.integers(1, 1000, 400)
    bounds = choose_bounds(ready.tolist(), nbytes.tolist(), alpha=0.001, beta=1e-6)
    assert bounds[-1] == 400
    assert landed(bounds, ready, nbytes, 0.001, 1e-6) <= landed(range(8, 401, 8), ready, nbytes, 0.001, 1e-6)


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-6))
def test_the_line_is_found_again(alpha, beta):
    sizes = [1e3, 1e5, 1e7]
    assert fit_line(sizes, [alpha + beta * size for size in sizes]) == pytest.approx((alpha, beta), rel=1e-3, abs=1e-12)


def test_neither_latency_nor_bandwidth_is_negative():
    assert fit_line([1e3, 2e3], [1.0, 4.0])[0] == 0 < fit_line([1e3, 2e3], [1.0, 4.0])[1]
    assert fit_line([1e3, 2e3], [4.0, 1.0])[1] == 0 < fit_line([1e3, 2e3], [4.0, 1.0])[0]


def control(rank=0):
    return SimpleNamespace(rank=rank, broadcast_object=lambda value: value)


def run(tuning, reducer, seconds, steps):
    """The policy of each step; a step's time is what `seconds` says of it."""
    policies = []
    for _ in range(steps):
        policies.append(reducer.mover)
        reducer.begin()
        reducer.begin_micro_batch(last=True)
        mover, reducer.mover = reducer.mover, None            # the stand-in for a thread moves nothing
        give(reducer.storage, {0: np.ones(4), 1: np.ones(4), 2: np.ones(4)})
        reducer.finish()
        reducer.mover = mover
        tuning.after_step(seconds(mover))
    return policies


def tuned(progress="poll", buckets=False):
    reducer = GradientReducer(storage_of(4, 4, 4), AllReduce(Channel(Clock(), 0.0)), bucket_bytes=1 << 20)
    thread = object()
    return reducer, thread, Tuning(reducer, control(), progress=progress, thread=thread, buckets=buckets)


@pytest.mark.parametrize("faster", ["poll", "thread"])
def test_the_faster_policy_is_kept_after_as_many_steps_of_each(faster):
    reducer, thread, tuning = tuned("auto")
    seen = run(tuning, reducer, lambda mover: 1.0 if (mover is thread) == (faster == "thread") else 2.0,
               WARM_STEPS + 2 * PAIRS + 1)
    assert seen[:WARM_STEPS] == [None] * WARM_STEPS
    assert seen[WARM_STEPS:-1] == [None, thread] * PAIRS
    assert reducer.mover is (thread if faster == "thread" else None) and tuning.choices["progress"]["choice"] == faster
    fresh, other, again = tuned("auto")
    again.restore(tuning.choices)
    assert fresh.mover is (other if faster == "thread" else None)
    assert set(run(again, fresh, lambda mover: 1.0, 20)) == {fresh.mover}


def test_nothing_is_measured_where_nothing_is_left_open():
    for progress in ("poll", "thread"):
        reducer, thread, tuning = tuned(progress)
        assert set(run(tuning, reducer, lambda mover: 1.0, 30)) == {thread if progress == "thread" else None}
        assert tuning.choices == {} and len(reducer.buckets) == 1


def note(times, name, at):
    if times.parameters is not None:
        times.parameters[name] = at


def test_bounds_are_chosen_once_recorded_and_taken_over_by_a_resumed_run(monkeypatch):
    reducer, _, tuning = tuned("auto", buckets=True)
    times = reducer.timeline
    each = reducer.storage.size * 8 / 3                       # bytes; a second apart and a second long: all leave at once
    monkeypatch.setattr(tuning, "_probe", lambda: (0.0, 1 / each))
    monkeypatch.setattr(times, "parameter_ready", lambda name: note(times, name, {"p2": 5.0, "p1": 6.0, "p0": 7.0}[name]))
    run(tuning, reducer, lambda mover: 1.0, WARM_STEPS + READY_STEPS - 1)
    assert len(reducer.buckets) == 1 and tuning.choices == {}
    run(tuning, reducer, lambda mover: 1.0, 1)
    assert [len(bucket.segments) for bucket in reducer.buckets] == [1, 1, 1]
    assert tuning.choices["buckets"]["bounds"] == [1, 2, 3] and reducer.timeline.parameters is None
    run(tuning, reducer, lambda mover: 1.0, WARM_STEPS + 2 * PAIRS)
    assert tuning.choices["progress"]["choice"] == "poll"
    fresh, _, again = tuned("auto", buckets=True)
    again.restore(tuning.choices)
    assert len(fresh.buckets) == 3 and again.choices == tuning.choices
    assert fresh.timeline.parameters is None                  # nobody notes the time of each gradient any more


def test_a_choice_of_another_number_of_ranks_is_not_taken_over():
    reducer, _, tuning = tuned(buckets=True)
    tuning.restore({"buckets": {"bounds": [1, 3], "ranks": 3}})
    assert len(reducer.buckets) == 1 and tuning.choices == {}


def test_bounds_that_do_not_fit_the_model_are_refused():
    _, _, tuning = tuned(buckets=True)
    with pytest.raises(CheckpointError, match=r"cuts \[4\] parameters into buckets, the model has 3; start a new run"):
        tuning.restore({"buckets": {"bounds": [1, 4], "ranks": 2}})


def test_the_probe_times_the_exchange_on_its_own_memory():
    reducer, _, tuning = tuned(buckets=True)
    alpha, beta = tuning._probe()
    assert alpha >= 0 and beta >= 0 and not reducer.gradients.any()


class StepsAlone:
    """Three ranks, of which the others hold zeros; notes how many numbers travel, and has no other sum."""

    size, done = 3, True
    messages = property(lambda self: self)

    def __init__(self):
        self.sizes, self.started = [], 0

    def prepare_steps(self, array, name, steps):
        self.sizes.append(array.size)
        return self

    def start(self):
        self.started += 1
        return self

    def test(self):
        return True

    def wait(self):
        pass


def test_the_probe_times_the_tree_where_steps_go_by_the_tree():
    tree, channel = RankTree(11, 1, 3), StepsAlone()
    assert len(tree.nodes) > 1 and tree.width > 1
    reducer = GradientReducer(storage_of(4, 4, 4), TreeSum(channel, tree))
    tuning = Tuning(reducer, control(), buckets=True)
    tuning._probe()
    assert channel.sizes == [tree.width * reducer.storage.size] and channel.started == PROBES
