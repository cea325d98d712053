"""Buckets, the tree over micro-batches, and when a bucket leaves: without MPI, on a channel that only takes notes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.autograd import Function, Tensor, run_backward
from mpitrain.comm.messages.prepare import Prepared
from mpitrain.nn import FlatStorage, Parameter
from mpitrain.nn.init import zeros
from mpitrain.parallel.gradients.bucket_sum import AllReduce
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.placement.buckets import plan_buckets


class Multiply(Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved
        return (grad * w if ctx.needs[0] else None, grad * x if ctx.needs[1] else None)


class Channel:
    """Notes what is started, and when; the sum over its one rank is the array itself."""

    size = 2
    done = True

    def __init__(self):
        self.started: list[str] = []

    def prepare(self, array, name):
        return Prepared(lambda: self.start_allreduce(array, name))

    def start_allreduce(self, array, name):
        self.started.append(name)
        return self

    def test(self):
        return True

    def wait(self):
        pass


def storage_of(*sizes: int) -> FlatStorage:
    parameters = [Parameter((n,), zeros) for n in sizes]
    for i, p in enumerate(parameters):
        p.name = f"p{i}"
    storage = FlatStorage(parameters, "float64")
    storage.values[...] = 1.0
    return storage


def give(storage: FlatStorage, contributions: dict[int, np.ndarray]) -> None:
    """One backward that lands these gradients, the last parameter's first."""
    x = Tensor(np.zeros(1), requires_grad=True)
    for i in sorted(contributions):
        p = storage.segments[i].parameter
        x = Leaf.apply(x, p, value=contributions[i])
    run_backward(x, np.ones(1))


class Leaf(Function):
    """Passes x on; the gradient of the parameter is a given value."""

    @staticmethod
    def forward(ctx, x, p, *, value):
        ctx.value = value
        return x.copy()

    @staticmethod
    def backward(ctx, grad):
        return grad, ctx.value


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 100))
def test_buckets_cover_every_element_once_and_start_from_the_end(sizes, limit):
    storage = storage_of(*sizes)
    buckets = plan_buckets(storage.segments, storage.size, limit)
    assert [b.index for b in buckets] == list(range(len(buckets)))
    assert buckets[0].stop == storage.size and buckets[-1].start == 0
    assert all(a.start == b.stop for a, b in zip(buckets, buckets[1:]))
    names = [s.name for b in buckets for s in reversed(b.segments)]
    assert names == [s.name for s in reversed(storage.segments)]
    assert all(b.stop - b.start >= limit for b in buckets[:-1])


def tree(values: list[np.ndarray]) -> np.ndarray:
    """The sum over a binary tree: aligned powers of two first, then what is left over from the right."""
    sums: list[tuple[int, np.ndarray]] = []
    for value in values:
        level = 0
        while sums and sums[-1][0] == level:
            value, level = sums.pop()[1] + value, level + 1
        sums.append((level, value))
    total = sums.pop()[1]
    while sums:
        total = sums.pop()[1] + total
    return total


@pytest.mark.parametrize("n_micro", range(1, 10))
def test_micro_batches_are_added_as_a_tree_in_few_arenas(n_micro):
    storage = storage_of(7, 3)
    rng = np.random.default_rng(n_micro)
    grads = [[rng.standard_normal(7) * 10.0**rng.integers(-8, 8), rng.standard_normal(3)] for _ in range(n_micro)]
    reducer = GradientReducer(storage, AllReduce(Channel()), bucket_bytes=8)
    for _ in range(2):                                     # a second step must not see the first
        reducer.begin()
        for i, (a, b) in enumerate(grads):
            reducer.begin_micro_batch(last=i == n_micro - 1)
            give(storage, {0: a, 1: b})
        reducer.finish()
        for k in range(2):
            np.testing.assert_array_equal(storage.segments[k].parameter.grad, tree([g[k] for g in grads]))
    assert len(reducer._arenas) <= n_micro.bit_length() + 1


def test_an_absent_parameter_is_skipped_not_added_as_zeros():
    storage = storage_of(2, 2)
    reducer = GradientReducer(storage, AllReduce(Channel()), bucket_bytes=1 << 20)
    reducer.begin()
    reducer.begin_micro_batch(last=False)
    give(storage, {0: np.array([-0.0, 1.0]), 1: np.ones(2)})
    reducer.begin_micro_batch(last=True)
    give(storage, {1: np.ones(2)})
    reducer.finish()
    assert np.signbit(storage.segments[0].parameter.grad[0])       # -0.0 + 0.0 would be +0.0
    np.testing.assert_array_equal(storage.segments[1].parameter.grad, [2, 2])


def test_a_parameter_that_took_no_part_gets_zero_even_where_the_arena_is_dirty():
    storage = storage_of(2, 2)
    reducer = GradientReducer(storage, AllReduce(Channel()), bucket_bytes=1)
    for given_to in ({0: np.ones(2), 1: np.ones(2)}, {1: np.ones(2)}):
        reducer.begin()
        reducer.begin_micro_batch(last=True)
        give(storage, given_to)
        reducer.finish()
    np.testing.assert_array_equal(storage.segments[0].parameter.grad, [0, 0])


def test_a_rank_without_micro_batches_contributes_zeros():
    storage = storage_of(2)
    reducer = GradientReducer(storage, AllReduce(Channel()), bucket_bytes=1)
    reducer.begin()
    reducer.begin_micro_batch(last=True)
    give(storage, {0: np.ones(2)})
    reducer.finish()
    reducer.begin()
    np.testing.assert_array_equal(reducer.finish(), np.zeros(storage.size))


def test_buckets_leave_during_backward_in_index_order():
    storage = storage_of(4, 4, 4)
    channel = Channel()
    reducer = GradientReducer(storage, AllReduce(channel), bucket_bytes=1)
    seen: list[int] = []
    reducer.begin()
    reducer.begin_micro_batch(last=True)
    parameters = [s.parameter for s in storage.segments]
    x = Tensor(np.ones(4), requires_grad=True)
    for p in parameters:
        x = Multiply.apply(x, p)
    run_backward(x, np.ones(4), progress=lambda: seen.append(len(channel.started)))
    assert seen == [1, 2, 3]                               # one bucket more after each layer's backward
    assert [name.split()[2] for name in channel.started] == ["0", "1", "2"]
    reducer.finish()
    assert len(channel.started) == 3


def test_a_bucket_whose_turn_has_not_come_waits():
    storage = storage_of(4, 4)
    channel = Channel()
    reducer = GradientReducer(storage, AllReduce(channel), bucket_bytes=1)
    reducer.begin()
    reducer.begin_micro_batch(last=True)
    give(storage, {0: np.ones(4)})                         # the first parameter's bucket is the second to go
    assert channel.started == []
    reducer.finish()
    assert [name.split()[2] for name in channel.started] == ["0", "1"]


def test_only_the_last_micro_batch_sends():
    storage = storage_of(4)
    channel = Channel()
    reducer = GradientReducer(storage, AllReduce(channel), bucket_bytes=1)
    reducer.begin()
    reducer.begin_micro_batch(last=False)
    give(storage, {0: np.ones(4)})
    assert channel.started == []
    reducer.begin_micro_batch(last=True)
    give(storage, {0: np.ones(4)})
    assert len(channel.started) == 1


def test_gradients_are_written_where_they_are_sent_from():
    storage = storage_of(4, 4)
    reducer = GradientReducer(storage, AllReduce(Channel()), bucket_bytes=1)
    reducer.begin()
    reducer.begin_micro_batch(last=True)
    give(storage, {0: np.full(4, 3.0), 1: np.ones(4)})
    p = storage.segments[0].parameter
    assert np.shares_memory(p.grad, reducer.gradients)
    reducer.finish()
    reducer.gradients[storage.segments[0].start] = 7.0
    assert p.grad[0] == 7.0


def test_arenas_live_in_the_memory_that_is_given():
    storage = storage_of(4, 4)
    given_out = []

    def allocate(nbytes):
        given_out.append(np.full(nbytes + 64, 255, np.uint8))                # of float64: NaN
        return given_out[-1][-given_out[-1].ctypes.data % 64:][:nbytes]

    reducer = GradientReducer(storage, AllReduce(Channel()), bucket_bytes=1, allocate=allocate)
    reducer.begin()
    reducer.begin_micro_batch(last=True)
    give(storage, {0: np.ones(4), 1: np.ones(4)})
    reducer.finish()
    assert len(given_out) == 1 and np.shares_memory(reducer.gradients, given_out[0])
    assert np.isfinite(reducer.gradients).all()            # the padding too, which is sent along
