"""Buckets in memory that ranks share: nothing is written where a sum may still read, in whatever order gradients come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain import nn
from mpitrain.comm.messages.prepare import Prepared
from mpitrain.comm.shared.channel import SharedChannel
from mpitrain.nn.init import constant
from mpitrain.nn.storage import FlatLayout
from mpitrain.parallel.gradients.bucket_sum import AllReduce
from mpitrain.parallel.policies.bucket_memory import ring
from mpitrain.parallel.policies.sharded_reducer import ShardedReducer
from mpitrain.placement.shards import Shards


class Late:
    """A sum that is made no earlier than somebody waits for it; what it adds up must be there still."""

    done = False

    def __init__(self, array: Any):
        self.array, self.was = array, array.copy()

    def wait(self) -> None:
        np.testing.assert_array_equal(self.array, self.was)
        self.array *= 2
        self.done = True


class Two(SharedChannel):
    """Two ranks that have the same gradients."""

    def __init__(self) -> None:
        self.size, self.rank, self.notes = 2, 0, []
        self.messages: Any = self
        self.shared = True

    def allocate(self, nbytes: int) -> Any:
        block = np.zeros(nbytes + 64, np.uint8)
        return block[-block.ctypes.data % 64:][:nbytes]

    def prepare(self, array: Any, name: str, *, dtype: str | None = None) -> Any:
        return Prepared(lambda: self.start_allreduce(array, name))

    def start_allreduce(self, array: Any, name: str, dtype: str | None = None) -> Any:
        return Late(array)


def backward(parameters: list[nn.Parameter], gradients: list[Any]) -> None:
    """What the engine does with each parameter's gradient, in this order."""
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = parameter.grad_buffer
        assert parameter.grad is not None
        parameter.grad[...] = gradient
        for hook in parameter.grad_hooks:
            hook(parameter)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=14), st.data())
def test_sums_are_those_of_all_gradients_in_whatever_order_they_come(sizes: list[int], draw: Any) -> None:
    parameters = [nn.Parameter((size,), constant(0.0)) for size in sizes]
    for i, parameter in enumerate(parameters):
        parameter.name = f"p{i}"
    shards = Shards(FlatLayout(parameters), 0, 1, bucket_bytes=800, cuts=[len(sizes)], whole=False)
    two = Two()
    reducer = ShardedReducer(shards, AllReduce(two), bucket_bytes=800, progress=None, rounds=3, chunks=[len(sizes)],
                             allocate=two.allocate)
    reducer.begin()
    total = np.zeros(sum(sizes))
    rng = np.random.default_rng(0)
    for micro in range(3):
        order = draw.draw(st.permutations(range(len(sizes))))[:draw.draw(st.integers(0, len(sizes)))]     # others take no part
        gradients = [rng.integers(0, 9, size).astype(np.float32) for size in sizes]
        reducer.begin_micro_batch(last=micro == 2)
        backward([parameters[i] for i in order], [gradients[i] for i in order])
        total += np.concatenate([2 * gradients[i] if i in order else np.zeros(sizes[i]) for i in range(len(sizes))])
    found = reducer.finish()
    views: Callable[[Any], list[Any]] = shards.views
    by_name = {part.name: view for part, view in zip(shards.segments, views(found))}
    np.testing.assert_array_equal(np.concatenate([by_name[p.name] for p in parameters]), total)
    reducer.close()


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(0, 30))
def test_each_place_of_a_ring_lies_inside_and_behind_the_one_before(lengths: list[int], more: int) -> None:
    size = max(lengths, default=0) + more
    starts = ring(lengths, size)
    assert all(start >= 0 and start + length <= size for start, length in zip(starts, lengths))
    assert all(b in (0, a + length) for a, b, length in zip(starts, starts[1:], lengths))
