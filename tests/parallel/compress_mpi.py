"""Compressed sums on real ranks against a simulation in one process, by messages between all ranks and between acted nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from identities import IdentityGathered, IdentityLinear, IdentityPacked

from mpitrain import nn
from mpitrain.autograd import Tensor, run_backward
from mpitrain.comm.messages.channel import Channel
from mpitrain.parallel.compress.channel import CompressedSum
from mpitrain.parallel.compress.compressor import OWNER, Gathered, Linear, Make, Packed, State, make_compressor
from mpitrain.parallel.compress.pieces import pieces_of
from mpitrain.parallel.gradients.bucket_sum import AllReduce
from mpitrain.parallel.gradients.reducer import GradientReducer

Array = np.ndarray[Any, Any]
EXACT = ["int8", "int4", "levels:5", "onebit", "topk:0.05"]  # their arithmetic is the engine's own, in the order of the ranks
LINEAR = ["powersgd:2", "randomk:0.1"]                       # summed by an all-reduce, whose order depends on the ranks
OURS = [*EXACT, *LINEAR]
STEPS = 4


class Model:
    """Layers whose parameters end within a line of memory, in a block and behind several."""

    def __init__(self, channel: Any, make: Make | None, bucket_bytes: int, **options: Any):
        self.model = nn.Sequential(nn.Linear(37, 150), nn.Linear(150, 90), nn.Linear(90, 3))
        self.layout = self.model.initialize(seed=3, dtype="float32")
        self.step, self.channel = 0, channel
        self.sum: Any = AllReduce(channel) if make is None else \
            CompressedSum(channel, self.layout, make, step=lambda: self.step, seed=5, **options)
        progress = channel.messages.progress
        self.reducer = GradientReducer(self.layout, self.sum, bucket_bytes=bucket_bytes, progress=progress.progress,
                                       allocate=channel.allocate)
        self.reducer.reserve()
        if make is not None:
            self.sum.connect()
            self.sum.open(self.reducer.buckets)

    def one_step(self, gradient: Array) -> Array:
        """The sum of the ranks' flat gradients, which hooks start parameter by parameter."""
        self.reducer.begin()
        self.reducer.begin_micro_batch(last=True)
        for segment in reversed(self.layout.segments):
            parameter = segment.parameter
            parameter.grad_buffer[...] = gradient[segment.start:segment.stop].reshape(segment.shape)
            parameter.grad = parameter.grad_buffer
            for hook in list(parameter.grad_hooks):
                hook(parameter)
            self.reducer.progress()
        found = self.reducer.finish().copy()
        self.step += 1
        return found


def gradient_of(rank: int, step: int, layout: Any) -> Array:
    flat = np.zeros(layout.size, np.float32)
    rng = np.random.default_rng([rank, step])
    for s in layout.segments:
        flat[s.start:s.stop] = rng.standard_normal(s.stop - s.start).astype(np.float32) * 10.0 ** rng.integers(-3, 2)
    return flat


class Simulated:
    """The sums over workers as one process makes them: each worker compresses whole parameters, whatever buckets there are."""

    def __init__(self, make: Make, layout: Any, n: int, *, seed: int = 5, feedback: bool = True):
        self.layout, self.n, self.step = layout, n, 0
        self.pieces = pieces_of(layout.segments, 0, layout.size)
        self.compressors = [make(self.pieces, n, seed=seed, feedback=feedback) for _ in range(n)]
        self.states: list[State] = [c.new_state() for c in self.compressors]

    def sum(self, gradients: list[Array]) -> Array:
        c, result = self.compressors[0], np.zeros(self.layout.size, np.float32)
        values = [g[:c.length].copy() for g in gradients]
        out = result[:c.length]
        if isinstance(c, Packed):
            message = np.zeros(c.nbytes(0, c.blocks), np.uint8)
            for worker in range(self.n):
                c.encode(self.step, worker, values[worker], self.states[worker].get("error"), 0, c.blocks, message)
                c.decode(message, 0, c.blocks, out, worker > 0)
            c.encode(self.step, OWNER, out.copy(), self.states[0].get("sum_error"), 0, c.blocks, message)
            c.decode(message, 0, c.blocks, out, False)
        elif isinstance(c, Gathered):
            messages = np.zeros((self.n, c.nbytes()), np.uint8)
            for worker in range(self.n):
                c.encode(self.step, values[worker], self.states[worker], messages[worker])
            c.decode(self.step, messages, out)
        else:
            assert isinstance(c, Linear)
            for phase in range(c.phases):
                sent = [np.zeros(c.words(phase), np.float32) for _ in range(self.n)]
                for worker in range(self.n):
                    c.encode(phase, self.step, values[worker], self.states[worker], sent[worker])
                arrived = sum(sent[1:], sent[0])
                for worker in range(self.n):
                    c.decode(phase, self.step, arrived, self.states[worker], values[worker])
            out[...] = values[0]
        self.step += 1
        return result


def same_everywhere(comm: Any, array: Array) -> bool:
    return len(set(comm.allgather(hashlib.sha256(array.tobytes()).hexdigest()))) == 1


def two_nodes(n: int) -> Callable[[int], int]:
    """Ranks on two nodes of equal size, every other one on the same."""
    return lambda rank: rank % 2 if n % 2 == 0 else rank


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 20])
@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("text", EXACT)
def test_the_sum_is_that_of_a_simulation_in_one_process_whatever_the_buckets(
        connect: Any, comm: Any, text: str, thread: bool, bucket_bytes: int) -> None:
    if comm.size == 1:
        pytest.skip("one rank has nobody to exchange with")
    channel = connect()
    model = Model(channel, make_compressor(text), bucket_bytes)
    if thread:
        model.reducer.mover = channel.progress.thread()
    simulated = Simulated(make_compressor(text), model.layout, comm.size)
    for step in range(STEPS):
        gradients = [gradient_of(rank, step, model.layout) for rank in range(comm.size)]
        found = model.one_step(gradients[comm.rank])
        assert found.tobytes() == simulated.sum(gradients).tobytes()
    own = {(h.leaf.name, h.first): h.array.tobytes() for h in model.sum.held("error")}
    whole = simulated.states[comm.rank]["error"]
    assert own == {(s.name, 0): whole[s.start:s.stop].tobytes() for s in model.layout.segments}
    channel.progress.close()


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 20])
@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("text", OURS)
def test_between_nodes_the_nodes_are_the_workers(connect: Any, comm: Any, text: str, thread: bool, bucket_bytes: int) -> None:
    if comm.size != 4:
        pytest.skip("two nodes of two ranks")
    channel = connect(lambda rank: rank % 2)
    model = Model(channel, make_compressor(text), bucket_bytes)
    if thread:
        model.reducer.mover = channel.messages.progress.thread()
    simulated = Simulated(make_compressor(text), model.layout, 2)
    for step in range(STEPS):
        everyone = [gradient_of(rank, step, model.layout) for rank in range(comm.size)]
        sums = [everyone[node] + everyone[node + 2] for node in (0, 1)]
        found = model.one_step(everyone[comm.rank])
        assert found.tobytes() == simulated.sum(sums).tobytes() and same_everywhere(comm, found)
    assert model.sum.workers == 2 and model.sum.shared is not None
    channel.messages.progress.close()


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct"])
@pytest.mark.parametrize("text", LINEAR)
def test_a_linear_one_goes_over_any_all_reduce(comm: Any, text: str, algorithm: str, bucket_bytes: int) -> None:
    if comm.size == 1:
        pytest.skip("one rank has nobody to exchange with")
    channel = Channel(comm.Dup(), "test", algorithm=algorithm)
    model = Model(channel, make_compressor(text), bucket_bytes)
    simulated = Simulated(make_compressor(text), model.layout, comm.size)
    for step in range(STEPS):
        gradients = [gradient_of(rank, step, model.layout) for rank in range(comm.size)]
        found, expected = model.one_step(gradients[comm.rank]), simulated.sum(gradients)
        assert same_everywhere(comm, found) and np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    channel.close()


@pytest.mark.parametrize("own", [IdentityPacked, IdentityLinear, IdentityGathered])
def test_with_an_identity_the_bits_are_those_of_the_plain_hierarchical_sum(connect: Any, comm: Any, own: Any) -> None:
    if comm.size not in (2, 4):
        pytest.skip("two nodes of equal size")
    plain, coded = (connect(lambda rank: rank % 2) for _ in range(2))
    models = Model(plain, None, 20_000), Model(coded, Make("identity", own), 20_000)
    for step in range(STEPS):
        gradient = gradient_of(comm.rank, step, models[0].layout)
        dense, found = (model.one_step(gradient) for model in models)
        assert found.tobytes() == dense.tobytes()


@pytest.mark.parametrize("after", [0, 2])
def test_the_bytes_posted_are_those_that_the_program_says(connect: Any, comm: Any, after: int) -> None:
    if comm.size == 1:
        pytest.skip("one rank has nobody to exchange with")
    for text in OURS:
        model = Model(connect(), make_compressor(text), 20_000, after=after)
        for step in range(4):
            before = model.sum.meter.sent
            model.one_step(gradient_of(comm.rank, step, model.layout))
            said = model.sum.coded_bytes if step >= after else model.sum.dense_bytes
            assert model.sum.meter.sent - before == said and model.sum.meter.abroad == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("text", OURS)
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(connect: Any, comm: Any, text: str, bad: float) -> None:
    if comm.size == 1:
        pytest.skip("one rank has nobody to exchange with")
    model = Model(connect(), make_compressor(text), 20_000)
    for segment in model.layout.segments:
        for place in (segment.start, segment.stop - 1):
            gradient = gradient_of(comm.rank, 0, model.layout)
            if comm.rank == comm.size - 1:
                gradient[place] = bad
            found = model.one_step(gradient)
            assert not np.isfinite(found[segment.start:segment.stop]).all()
            assert same_everywhere(comm, np.isfinite(found))
            assert all(np.isfinite(h.array).all() for h in model.sum.held("error"))


def test_without_feedback_nothing_is_kept(connect: Any, comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank has nobody to exchange with")
    model = Model(connect(), make_compressor("topk:0.05"), 20_000, feedback=False)
    simulated = Simulated(make_compressor("topk:0.05"), model.layout, comm.size, feedback=False)
    for step in range(2):
        gradients = [gradient_of(rank, step, model.layout) for rank in range(comm.size)]
        assert model.one_step(gradients[comm.rank]).tobytes() == simulated.sum(gradients).tobytes()
    assert not model.sum.flat and model.sum.state_bytes == 0


def test_a_warm_up_sends_more_at_first_from_the_same_residuals(connect: Any, comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank has nobody to exchange with")
    model = Model(connect(), make_compressor("topk:0.05"), 20_000, after=1, warmup=4)
    wide, half, last = (Simulated(make_compressor(f"topk:{share}"), model.layout, comm.size) for share in (0.2, 0.1, 0.05))
    wide.states = half.states = last.states
    sent = []
    for step, simulated in enumerate((None, wide, wide, half, half, last)):
        gradients = [gradient_of(rank, step, model.layout) for rank in range(comm.size)]
        before, found = model.sum.meter.sent, model.one_step(gradients[comm.rank])
        sent.append(model.sum.meter.sent - before)
        if simulated is not None:
            assert found.tobytes() == simulated.sum(gradients).tobytes(), step
    assert sent[1] == sent[2] > 1.8 * sent[3] > 3 * sent[5] and sent[5] == model.sum.coded_bytes


def test_backward_starts_compressed_buckets_and_moves_them(connect: Any, comm: Any) -> None:
    """Through the autograd engine; all buffers come back."""
    if comm.size == 1:
        pytest.skip("one rank has nobody to exchange with")
    channel = connect(two_nodes(comm.size))
    model = Model(channel, make_compressor("int8"), 20_000)
    for step in range(4):
        model.reducer.begin()
        model.reducer.begin_micro_batch(last=True)
        y = model.model(Tensor(np.random.default_rng([comm.rank, step]).standard_normal((4, 37)).astype(np.float32)))
        run_backward(y, np.ones(y.shape, np.float32), progress=model.reducer.progress)
        assert same_everywhere(comm, model.reducer.finish())
        model.step += 1
    pool = model.sum.peers.pools.host
    assert pool.allocated and sum(buffer.nbytes for buffer in pool._free) == pool.allocated
    assert len(channel.messages.progress) == 0 and len(model.sum.peers.progress) == 0
