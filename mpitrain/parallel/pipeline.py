"""Runs one stage's forwards and backwards in the order a schedule gives. With one stage that is gradient accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import asnumpy, random
from mpitrain.comm.channel import Channel
from mpitrain.nn import Module
from mpitrain.parallel.diagnose import refuse_nonfinite_loss
from mpitrain.parallel.feed import Feed
from mpitrain.parallel.reducer import GradientReducer
from mpitrain.parallel.timeline import SpanMaker, no_span
from mpitrain.schedules.pipeline import Schedule, one_f_one_b


class MicroBatch(Protocol):
    """Rows of the global batch: `x`, `y` host arrays, `first` the position of the first row in the global batch."""

    x: Any
    y: Any
    index: int
    first: int
    step: int


class Loss(Protocol):
    """`loss(output, target)` is a SUM; `count(target)` says over how many terms."""

    def __call__(self, output: Tensor, target: Any) -> Tensor: ...
    def count(self, target: Any) -> int: ...


class Pipeline:
    """The model's forward and backward over the micro-batches of one step.

    Each micro-batch's loss is a sum; its gradient starts from 1 / (the count over all ranks), so the exchange only ever adds,
    and batches of uneven size stay exact.
    """

    def __init__(self, model: Module, loss: Loss, channel: Channel, reducer: GradientReducer, feed: Feed, *, n_micro: int,
                 seed: int = 0, schedule: Schedule = one_f_one_b, after_forward: Callable[[int], None] | None = None):
        self.model, self.loss, self.channel, self.reducer = model, loss, channel, reducer
        self.feed, self.seed, self.schedule = feed, seed, schedule
        self.span: SpanMaker = no_span                      # what a profile listens to
        self.n_micro, self.after_forward = n_micro, after_forward
        self.count = 0.0                                    # terms of the loss in the last step, over all ranks
        self.flag = 0.0                                     # sum over ranks of what the caller passed to run

    def run(self, micro_batches: Sequence[MicroBatch], *, flag: float = 0.0) -> np.ndarray[Any, Any]:
        """Each micro-batch's part of the global mean loss, (`n_micro`,) float64, zero where it is another rank's.

        Gradients are summed into the reducer, whose buckets leave as they fill.
        `flag` travels with the count and comes back as the sum over ranks, in `self.flag`.
        """
        local = np.array([sum(self.loss.count(m.y) for m in micro_batches), flag], dtype=np.float64)
        counting = self.channel.start_allreduce(local, "loss count") if self.channel.size > 1 else None
        live: dict[int, Tensor] = {}
        losses, n = np.zeros(self.n_micro), len(micro_batches)
        for action in self.schedule(0, 1, n):
            i = action.micro
            if action.kind == "F":
                with self.span("compute", f"forward {micro_batches[i].index}"):
                    live[i] = self.forward(micro_batches[i])
                losses[micro_batches[i].index] = self._value(live[i], micro_batches[i])
                if self.after_forward is not None:
                    self.after_forward(micro_batches[i].index)
                continue
            if i == 0 and counting is not None:
                with self.span("compute", "exchange of the count"):
                    counting.wait()
            result = live.pop(i)
            self.reducer.begin_micro_batch(micro_batches[i].index, last=i == n - 1)
            with self.span("compute", f"backward {micro_batches[i].index}"):
                run_backward(result, result.xp.asarray(1.0 / max(local[0], 1.0), dtype=result.dtype),
                             progress=self.reducer.progress)
        if counting is not None:
            counting.wait()
        self.count, self.flag = float(local[0]), float(local[1])
        return losses / max(self.count, 1.0)

    def forward(self, micro: MicroBatch) -> Tensor:
        """The summed loss of one micro-batch, with random numbers keyed by (seed, step, row of the global batch, layer)."""
        rows = np.arange(micro.first, micro.first + len(micro.x), dtype=np.uint64)
        with random.use(random.Scope(self.seed, micro.step, rows)):
            output = self.model(Tensor(self.feed.inputs(micro.x)))
        return self.loss(output, self.feed.targets(micro.y))

    def _value(self, loss: Tensor, micro: MicroBatch) -> float:
        """The summed loss as a number, looked at before its gradient is sent anywhere."""
        value = float(asnumpy(loss.array))
        if not math.isfinite(value):
            refuse_nonfinite_loss(self.model, self.feed.inputs(micro.x), value, step=micro.step, micro_batch=micro.index)
        return value
