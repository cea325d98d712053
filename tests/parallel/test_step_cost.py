"""What a step costs beside its arithmetic: calls of Python functions, reference cycles, memory that outlives it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from policy_setup import initialised

from mpitrain import models, nn, optim
from mpitrain.autograd import Function, Tensor, run_backward
from mpitrain.comm.messages.prepare import ALONE
from mpitrain.data import MicroBatch
from mpitrain.kernels.kernel import kind
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.parallel.pipeline.runner import Pipeline
from mpitrain.parallel.policies.replicated import Replicated
from mpitrain.placement import stages

pytestmark = pytest.mark.alone


class Alone:
    """A channel of one rank."""

    size, rank, shared, notes = 1, 0, False, ()

    def prepare(self, array: Any, name: str) -> Any:
        return ALONE

    def allreduce(self, array: Any, *, name: str) -> None:
        """The sum is the array."""


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {         # (model, shape of a sample, classes)
    "mlp": (lambda: models.mlp(12, [9, 8], 5), (12,), 5),
    "lenet": (models.lenet, (1, 28, 28), 10),
    "resnet": (lambda: models.resnet20(10), (3, 8, 8), 10),
    "gpt": (lambda: models.gpt(2, 2, 16, 8, 11, dropout=0.1), (8,), 11),
}


def stepper(name: str) -> Callable[[], Any]:
    """A function that trains one step of a small model, as a run of one rank does."""
    make, shape, classes = MODELS[name]
    model, channel = make(), Alone()
    update, loss = initialised(Replicated, model, channel, clip_norm=1.0, seed=0), nn.LOSSES["cross_entropy"]()
    update.open(optim.AdamW(update.storage, lr=1e-3), lambda step: 1e-3)
    feed = Feed(update.layout.device, update.layout.dtype, tokens=name == "gpt")
    pipeline = Pipeline(stages.whole(model), loss, channel, update.reducer, feed, n_micro=1)
    rng = np.random.default_rng(0)
    x = rng.integers(0, classes, (4, *shape)) if name == "gpt" else rng.standard_normal((4, *shape), np.float32)
    micro = MicroBatch(x, rng.integers(0, classes, x.shape if name == "gpt" else 4), np.arange(len(x), dtype=np.uint64), 0, 0, 0)

    def step() -> None:
        update.begin()
        pipeline.run([micro])
        update.finish()
    return step


def calls(function: Callable[[], Any]) -> int:
    """How many functions written in Python `function` calls."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", list(MODELS))
def test_a_step_makes_no_reference_cycles(name: str) -> None:
    step = stepper(name)
    step()
    gc.collect()
    gc.disable()
    try:
        step()
        step()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_the_test_of_cycles_notices_one() -> None:
    gc.collect()
    ring: list[Any] = []
    ring.append(ring)
    del ring
    assert gc.collect() == 1


class Same(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save(x, y)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, _ = ctx.saved
        return grad, ctx.out(1)


def test_an_op_is_ten_calls_of_python_forward_and_ten_backward() -> None:
    """Of its own functions too: forward and `save`, backward, `saved` and `out`."""
    x, y = (Tensor(np.ones(3, np.float32), requires_grad=True) for _ in range(2))

    def chain(n: int) -> Any:
        result = x
        for _ in range(n):
            result = Same.apply(result, y)
        return result
    chain(1)
    assert calls(lambda: chain(11)) - calls(lambda: chain(1)) <= 10 * 10
    assert calls(lambda: run_backward(chain(11), x.array)) - calls(lambda: run_backward(chain(1), x.array)) <= 10 * (10 + 10)


@pytest.mark.skipif(kind() != "c", reason="before loops of Numba stands a door in Python, and expressions call functions")
@pytest.mark.parametrize(("name", "ops", "each"), [("mlp", 5, 80), ("lenet", 12, 75), ("resnet", 46, 95), ("gpt", 57, 40)])
def test_a_step_of_one_rank_is_so_many_calls_of_python_for_each_op(name: str, ops: int, each: int) -> None:
    """A walk over the model's modules, or a check of every parameter, would show."""
    step = stepper(name)
    step()                                        # kernels are looked for, memory is made
    assert calls(step) < each * ops
