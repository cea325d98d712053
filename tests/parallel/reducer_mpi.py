"""The reducer on real ranks: exact sums, whoever skips what, and one set of bits on all of them."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import nn
from mpitrain.autograd import Tensor, no_grad, run_backward
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import DesyncError
from mpitrain.parallel.gradients.bucket_sum import AllReduce
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.replicas import broadcast_state, checksum


def build(channel, bucket_bytes=64):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    storage = model.initialize(seed=3, dtype="float64")
    return model, GradientReducer(storage, AllReduce(channel), bucket_bytes=bucket_bytes, progress=channel.progress.progress)


def run(model, reducer, rows, skip=None):
    """One step: each of `rows` is a micro-batch of this rank; block `skip` takes no part here."""
    reducer.begin()
    for i, x in enumerate(rows):
        reducer.begin_micro_batch(last=i == len(rows) - 1)
        y = Tensor(x)
        for k, block in enumerate(model):
            if k != skip:
                y = block(y)
        run_backward(y, np.ones(y.shape), progress=reducer.progress)
    return reducer.finish()


def inputs(rank, step, n):
    """Small integers, so that every order of addition gives the same bits."""
    return [np.random.default_rng([rank, step, i]).integers(-2, 3, (2, 4)).astype(float) for i in range(n)]


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
@pytest.mark.promise("D7")
def test_the_sum_is_that_of_one_rank_with_all_micro_batches(comm, bucket_bytes):
    channel = Channel(comm.Dup(), "test")
    model, reducer = build(channel, bucket_bytes)
    with no_grad():
        for p in model.parameters():
            p.copy_(np.round(p.array * 4))
    for step in range(2):
        found = run(model, reducer, inputs(channel.rank, step, channel.rank + 1)).copy()
        alone = Channel(comm.Split(channel.rank), "alone")
        twin, single = build(alone, bucket_bytes)
        with no_grad():
            for p, q in zip(twin.parameters(), model.parameters()):
                p.copy_(q.array)
        everyone = [x for rank in range(channel.size) for x in inputs(rank, step, rank + 1)]
        np.testing.assert_array_equal(found, run(twin, single, everyone))
        alone.close()
    channel.close()


def test_ranks_may_skip_different_parameters(comm):
    channel = Channel(comm.Dup(), "test")
    model, reducer = build(channel)
    flat = run(model, reducer, inputs(channel.rank, 0, 1), skip=channel.rank)
    channel.agree(checksum({"gradients": flat}), "the sums")
    for k, block in enumerate(model):
        assert channel.size == 1 and k == 0 or block.weight.grad is not None
    channel.close()


def test_a_rank_without_work_takes_part_with_zeros(comm):
    channel = Channel(comm.Dup(), "test")
    model, reducer = build(channel)
    rows = inputs(0, 0, 2) if channel.rank == 0 else []
    flat = run(model, reducer, rows)
    channel.agree(checksum({"gradients": flat}), "the sums")
    assert np.abs(flat).sum() > 0
    channel.close()


def test_every_rank_starts_from_the_values_of_rank_0(comm):
    channel = Channel(comm.Dup(), "test")
    model, _ = build(channel)
    with no_grad():
        model[0].weight.copy_(np.full((4, 4), float(channel.rank)))
    broadcast_state({name: p.array for name, p in model.named_parameters()}, channel)
    assert (model[0].weight.array == 0).all()
    if channel.size > 1:
        with pytest.raises(DesyncError, match="something: rank 0 has"):
            channel.agree(channel.rank, "something")
    channel.close()
