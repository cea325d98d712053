"""One tree over the micro-batches of all ranks: the bits are those of the tree written down, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.autograd import Function, Tensor, run_backward
from mpitrain.comm.messages.channel import Channel
from mpitrain.nn import FlatStorage, Parameter
from mpitrain.nn.init import zeros
from mpitrain.parallel.gradients.bucket_sum import AllReduce, TreeSum, prepare_tree
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.statistics import Statistics
from mpitrain.schedules.microtree import RankTree

SIZES = (3, 20, 1, 33, 16)


class Leaf(Function):
    """Passes x on; the gradient of the parameter is a given value."""

    @staticmethod
    def forward(ctx, x, p, *, value):
        ctx.value = value
        return x.copy()

    @staticmethod
    def backward(ctx, grad):
        return grad, ctx.value


def gradient(micro, parameter):
    """Of all magnitudes, so that every order of addition rounds in its own way; zeros of both signs among them."""
    rng = np.random.default_rng([micro, parameter])
    values = rng.standard_normal(SIZES[parameter]) * 10.0 ** rng.integers(-4, 5, SIZES[parameter])
    values[0] = -0.0 if parameter % 2 else 0.0
    return values.astype(np.float32)


def takes_part(micro, parameter, pattern):
    """Whether a micro-batch has a gradient for a parameter: all do, most do, or none of one."""
    return {"all": True, "some": (micro * 7 + parameter * 3) % 4 != 0, "none of one": parameter != 2}[pattern]


def written_down(n_micro, parameter, pattern, absent):
    """The sum by the definition: halves at the largest power of two below the length, what takes no part left out."""
    def total(start, stop):
        if stop - start == 1:
            there = start not in absent and takes_part(start, parameter, pattern)
            return gradient(start, parameter) if there else None
        middle = start + max(2**k for k in range(20) if 2**k < stop - start)
        left, right = total(start, middle), total(middle, stop)
        return left if right is None else right if left is None else left + right
    return total(0, n_micro)


def step(reducer, storage, mine, pattern):
    reducer.begin()
    for micro in mine:
        reducer.begin_micro_batch(micro, last=micro == mine[-1])
        x = Tensor(np.zeros(1, np.float32), requires_grad=True)
        for i, segment in enumerate(storage.segments):
            if takes_part(micro, i, pattern):
                x = Leaf.apply(x, segment.parameter, value=gradient(micro, i))
        run_backward(x, np.ones(1, np.float32), progress=reducer.progress)
    return reducer.finish()


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("pattern", ["all", "some", "none of one"])
@pytest.mark.parametrize("absent", [(), (3,), (0, 1, 2)])
@pytest.mark.promise("D5")
def test_the_bits_are_those_of_the_tree_written_down(comm, bucket_bytes, pattern, absent):
    channel = Channel(comm.Dup(), "test")
    for n_micro in (channel.size, 8, 11):
        if n_micro < channel.size:
            continue
        parameters = [Parameter((n,), zeros) for n in SIZES]
        for i, p in enumerate(parameters):
            p.name = f"p{i}"
        storage = FlatStorage(parameters, "float32")
        tree = RankTree(n_micro, channel.rank, channel.size)
        reducer = GradientReducer(storage, TreeSum(channel, tree), bucket_bytes=bucket_bytes, progress=channel.progress.progress)
        mine = [m for m in range(tree.first, tree.stop) if m not in absent]
        for _ in range(2):
            found = storage.views(step(reducer, storage, mine, pattern))
            for i, values in enumerate(found):
                wanted = written_down(n_micro, i, pattern, absent)
                wanted = np.full(SIZES[i], -0.0, np.float32) if wanted is None else wanted
                assert values.tobytes() == wanted.tobytes(), f"{n_micro} micro-batches, parameter {i}"
    channel.close()


def test_the_plain_sum_has_other_bits_somewhere(comm):
    """So the test above can fail: each rank's own sum, added by a ring or by doubling, is rounded in another way."""
    channel = Channel(comm.Dup(), "test", algorithm="ring")
    parameters = [Parameter((n,), zeros) for n in SIZES]
    for i, p in enumerate(parameters):
        p.name = f"p{i}"
    storage = FlatStorage(parameters, "float32")
    tree = RankTree(11, channel.rank, channel.size)
    reducer = GradientReducer(storage, AllReduce(channel), progress=channel.progress.progress)
    found = storage.views(step(reducer, storage, list(range(tree.first, tree.stop)), "all"))
    same = all(values.tobytes() == written_down(11, i, "all", ()).tobytes() for i, values in enumerate(found))
    assert same == (channel.size == 1)
    channel.close()


@pytest.mark.parametrize("take_back", [False, True])
def test_a_sum_that_a_thread_moves_is_moved_by_nobody_else(comm, take_back):
    """Rank 0 looks while its sum cannot end: the others begin when it has looked."""
    if comm.size == 1:
        pytest.skip("one rank has nothing in flight")
    channel = Channel(comm.Dup(), "test")
    tree, thread = RankTree(8 * comm.size - 1, comm.rank, comm.size), channel.progress.thread()
    assert tree.width > 1
    sums = [np.full(5, 10.0 ** i) for i in range(len(tree.nodes))]
    expected = sum(comm.allgather(sum(array[0] for array in sums)))
    if comm.rank:
        comm.recv(source=0)
    with thread.lock:
        whole = prepare_tree(channel, tree, sums, "bucket")
        assert whole is not None
        work = whole.start()
    thread.hand_over(work)
    if comm.rank == 0:
        assert len(channel.progress) == 0
        if take_back:
            thread.take_back()
            assert len(channel.progress) == 1
        for other in range(1, comm.size):
            comm.send(None, dest=other)
    thread.take_back()
    work.wait()
    assert (sums[0] == expected).all() and len(channel.progress) == 0
    channel.progress.close()
    channel.close()


class Norm:
    """A model whose layer records what it is told."""

    def __init__(self):
        from mpitrain import nn
        self.model = nn.Sequential(("norm", nn.BatchNorm1d(3)))
        self.model.initialize(seed=0, dtype="float32")
        nn.defer_statistics(self.model)
        self.running = self.model["norm"].running

    def record(self, micro):
        rng = np.random.default_rng(micro)
        self.running.record(rng.standard_normal(3) * 10.0 ** rng.integers(-9, 9, 3), rng.standard_normal(3))


@pytest.mark.parametrize("absent", [(), (1, 2)])
def test_statistics_are_added_in_the_same_tree(comm, absent):
    channel = Channel(comm.Dup(), "test")
    for n_micro in (channel.size, 7, 8):
        if n_micro < channel.size:
            continue
        tree = RankTree(n_micro, channel.rank, channel.size)
        layer = Norm()
        statistics = Statistics([layer.model], channel, tree)
        for _ in range(2):
            for micro in range(tree.first, tree.stop):
                if micro not in absent:
                    layer.record(micro)
                    statistics.after_forward(micro)
            found = statistics.total()

            def total(start, stop):
                if stop - start == 1:
                    if start in absent:
                        return np.zeros(7)
                    alone = Norm()
                    alone.record(start)
                    return alone.running.take()
                middle = start + max(2**k for k in range(9) if 2**k < stop - start)
                return total(start, middle) + total(middle, stop)

            assert found.tobytes() == total(0, n_micro).tobytes()
            assert found[-1] == n_micro - sum(micro < n_micro for micro in absent)
    channel.close()
