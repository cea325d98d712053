"""Momenta at 1 bit on real ranks against a simulation in one process, between all ranks and between acted nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpitrain import nn
from mpitrain.optim.one_bit import OneBitAdam
from mpitrain.parallel.compress.one_bit import MomentumSum
from mpitrain.parallel.gradients.reducer import GradientReducer

Array = np.ndarray[Any, Any]
STEPS, BLOCK = 4, 4096


def gradient(size: int, step: int, rank: int, bad: bool = False) -> Array:
    found = np.random.default_rng([step, rank]).standard_normal(size).astype(np.float32)
    if bad:
        found[7] = np.nan
    return found


def blocks_of(layout: Any) -> Iterator[slice]:
    for s in layout.segments:
        yield from (slice(start, min(start + BLOCK, s.stop)) for start in range(s.start, s.stop, BLOCK))


def signs(wanted: Array, active: Array, layout: Any) -> Array:
    """The signs of the active elements of each block, times their mean size; 0 elsewhere."""
    found = np.zeros_like(wanted)
    for block in blocks_of(layout):
        on = active[block]
        if on.any():
            found[block][on] = np.abs(wanted[block][on]).mean() * np.where(np.signbit(wanted[block][on]), -1, 1)
    return found


class Model:
    """A model behind its freeze: some elements never had a gradient, some of whole blocks."""

    def __init__(self, channel: Any, comm: Any):
        model = nn.Sequential(nn.Linear(70, 80), nn.Linear(80, 90), nn.Linear(90, 3))
        self.layout, self.step = model.initialize(seed=3, dtype="float32"), 2
        self.optimizer = OneBitAdam(model, freeze=2, lr=0.01)
        self.optimizer.planned(50, comm.size)
        rng, state = np.random.default_rng(5), self.optimizer.state
        state["m"][...] = rng.standard_normal(self.layout.size)
        state["v"][...] = rng.random(self.layout.size) * (rng.random(self.layout.size) < 0.8)
        first = self.layout.segments[0]
        state["v"][first.start:first.start + BLOCK] = 0
        for name in "mv":
            kept = np.zeros(self.layout.size, np.float32)
            for s in self.layout.segments:
                kept[s.start:s.stop] = state[name][s.start:s.stop]
            state[name][...] = kept
        state["m"][state["v"] == 0] = 0
        self.optimizer.steps = 2
        self.sum = MomentumSum(channel, self.layout, self.optimizer, step=lambda: self.step, rate=lambda: 0.01, seed=0)
        self.reducer = GradientReducer(self.layout, self.sum, bucket_bytes=20_000, progress=channel.messages.progress.progress,
                                       allocate=channel.allocate)
        self.reducer.reserve()
        self.sum.connect()
        self.sum.open(self.reducer.buckets)

    def one_step(self, given: Array) -> Array:
        self.reducer.begin()
        self.reducer.begin_micro_batch(last=True)
        for s in reversed(self.layout.segments):
            s.parameter.grad_buffer[...] = given[s.start:s.stop].reshape(s.shape)
            s.parameter.grad = s.parameter.grad_buffer
            for hook in list(s.parameter.grad_hooks):
                hook(s.parameter)
        found: Array = self.reducer.finish().copy()
        self.step += 1
        return found


def test_signs_of_what_moves_arrive_as_the_new_momentum(comm: Any, connect: Callable[..., Any]) -> None:
    """Each worker, a rank or a node, and each owner of a block keeps what its rounding left out. One rank rounds, too."""
    nodes = [None] if comm.size < 4 else [None, lambda rank: 2 * rank // comm.size]
    for node_of in nodes:
        channel = connect(node_of)
        model = Model(channel, comm)
        layout, active = model.layout, model.optimizer.state["v"] > 0
        worker_of = [rank if node_of is None else node_of(rank) for rank in range(comm.size)]
        errors, owed = [np.zeros(layout.size) for _ in set(worker_of)], np.zeros(layout.size)
        for step in range(STEPS):
            m = model.optimizer.state["m"].astype(np.float64)
            wanted = [error.copy() for error in errors]
            for rank, worker in enumerate(worker_of):
                wanted[worker] += 0.9 * m / comm.size + 0.1 * gradient(layout.size, step, rank)
            sent = [signs(one, active, layout) for one in wanted]
            errors = [np.where(active, one - said, 0) for one, said in zip(wanted, sent)]
            total = np.sum(sent, axis=0) + owed
            expected = signs(total, active, layout)
            owed = np.where(active, total - expected, 0)
            arrived = model.one_step(gradient(layout.size, step, comm.rank))
            assert len(set(comm.allgather(arrived.tobytes()))) == 1
            for s in layout.segments:
                np.testing.assert_allclose(arrived[s.start:s.stop], expected[s.start:s.stop], rtol=1e-4, atol=1e-7)
            before = model.optimizer.state["m"].copy()
            model.optimizer.update(arrived, lr=0.01, step=step + 3)
            assert not np.array_equal(before, model.optimizer.state["m"])
            assert not model.optimizer.state["m"][~active].any()
        assert set(model.sum.flat) == {"error", "sum_error"} and not model.sum.flat["error"][~active].any()
        model.reducer.close()


def test_what_is_not_a_number_comes_through_from_elements_that_never_moved(comm: Any, connect: Callable[..., Any]) -> None:
    model = Model(connect(), comm)
    first = model.layout.segments[0].start
    assert first == 0 and not model.optimizer.state["v"][7]
    arrived = model.one_step(gradient(model.layout.size, 0, comm.rank, bad=comm.rank == comm.size - 1))
    assert np.isnan(arrived).any()
    assert np.isfinite(model.sum.flat["error"]).all()
    model.reducer.close()
