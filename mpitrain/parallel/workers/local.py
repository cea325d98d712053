"""Local training: where a step has the forward and backward of a micro-batch, a round has a worker's training.

    run(turns)    for each turn: theta_start -> so many steps of the worker's own optimizer on its own rows -> theta_worker
                  delta = theta_start - theta_worker, weighted -> the seat's arena of gradients -> buckets leave after the last
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor, part_of_batch, run_backward
from mpitrain.autograd.mode import holding_hooks
from mpitrain.backend import Array, random
from mpitrain.data import MicroBatch
from mpitrain.data.rounds import Rounds, Turn
from mpitrain.errors import NumericsError
from mpitrain.nn.loss import terms
from mpitrain.optim import Optimizer, clip_factor
from mpitrain.optim.norm import squared_norm
from mpitrain.parallel.pipeline.nonfinite import nonfinite_loss
from mpitrain.parallel.pipeline.runner import Parts, Pipeline
from mpitrain.parallel.workers.policy import Federated
from mpitrain.parallel.workers.tallies import RoundTallies

ARRAYS = 4                  # of the parameters' size: where a round begins, a worker's delta and gradient, a seat's sum


class LocalTraining(Pipeline):
    """The turns of a rank, one after another on one model: each begins where the round began, with a new `inner` optimizer.

    The pipeline's gradients are the workers' deltas. The learning rate of the `policy` is the inner one, by the round, and
    `clip_norm` (0: none) bounds the gradient of each local step.
    """

    tallies: RoundTallies

    def __init__(self, *pipeline: Any, rounds: Rounds, inner: Optimizer, policy: Federated, clip_norm: float, **options: Any):
        super().__init__(*pipeline, **options)
        self.inner, self.policy, self.clip_norm = inner, policy, clip_norm
        self.deltas, self.correction, self.storage = policy.deltas, policy.correction, policy.storage
        nbytes = self.correction.sums * sum(s.parameter.size for s in self.storage.segments) * self.storage.values.itemsize
        self.tallies = RoundTallies(self.stage, rounds, self.deltas, nbytes)
        self.values: Array = self.storage.values
        self.start, self.delta = np.empty_like(self.values), np.empty_like(self.values)
        self.seat, self.gradients = np.empty_like(self.values), self.storage.new_flat()
        self._leaves = [(s.parameter, view) for s, view in zip(self.storage.segments, self.storage.views(self.gradients))]

    def run(self, micro_batches: Sequence[Any], *, flags: tuple[float, float] = (0.0, 0.0)) -> Parts:
        """Each seat's part of the round's mean loss, (`n_micro`,) float64: the workers' weighted means over their local steps."""
        turns: Sequence[Turn] = micro_batches
        self._counted.begin((), 0, flags)
        losses, self.waited_s, self.blamed, round = np.zeros(self.n_micro), 0.0, [], self.policy.step
        lr = self.policy.rate(round - self.policy.behind)
        self.start[...] = self.values
        self.deltas.begin(round)
        self.tallies.round = round
        self.correction.begin_round(round)
        self._take_turns(turns, lr, losses)
        self._to_start()
        if self._counted.travels:
            self._counted.wait()
        self.flags = self._counted.flags
        return losses

    def _take_turns(self, turns: Sequence[Turn], lr: float, losses: np.ndarray[Any, Any]) -> None:
        """Trains the workers of this rank, seat by seat, and delivers their deltas; adds to the seats' `losses`."""
        for index, seat in groupby(turns, key=lambda turn: turn.index):
            for number, turn in enumerate(seat):
                with self.span("compute", f"worker {turn.worker}"):
                    losses[index] += turn.weight * self._train(turn, lr)
                    self.deltas.add(turn, self.delta, self.seat, first=number == 0)
            self._deliver(index, last=turn is turns[-1])

    def between(self) -> None:
        """Between two local steps of a worker: a subclass may look after its messages."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that workers on this rank have beside the parameters."""
        arrays = [ARRAYS * self.values.nbytes, *(one.nbytes for one in self.correction.shared.values())]
        return int(self.inner.nbytes + sum(arrays) + sum(one.nbytes for one in self.correction.hosted.values()))

    def _deliver(self, index: int, *, last: bool) -> None:
        """The seat's sum becomes the gradient of its micro-batch."""
        self.reducer.begin_micro_batch(index, last=last)
        self.reducer.arenas[self.reducer.arena][...] = self.seat
        for leaf, _ in self._leaves:
            if leaf.requires_grad:
                leaf.grad = leaf.grad_buffer
                if id(leaf) in self.reached:
                    for hook in leaf.grad_hooks:
                        hook(leaf)

    def _to_start(self) -> None:
        self.values[...] = self.start
        for leaf, _ in self._leaves:
            leaf.mark_changed()

    def _train(self, turn: Turn, lr: float) -> float:
        """A worker's round: leaves its `delta`, and returns its mean loss. NumericsError where that is not finite."""
        self._to_start()
        self.inner.restart()
        self.correction.begin(turn, self.start)
        for leaf, view in self._leaves:
            leaf.grad_buffer = view
        total, count = [], 0.0
        for number in range(len(turn.plan)):
            batch = turn.batch(number)
            value, n = self._step(turn, number, batch, lr)
            if not math.isfinite(value):
                self.delta.fill(math.nan)
                return math.nan
            total.append(value)
            count += n
            self.between()
        np.subtract(self.start, self.values, out=self.delta)
        self.correction.end(turn, self.delta, len(turn.plan), lr)
        return math.fsum(total) / (count or 1.0)

    def _step(self, turn: Turn, number: int, batch: MicroBatch, lr: float) -> tuple[float, float]:
        """(summed loss of the batch before the step, its terms)."""
        x, target = self.feed.tensors(batch.x), self.feed.targets(batch.y)
        with random.use(random.Scope(turn.base, number, np.arange(len(batch.samples), dtype=np.uint64))):
            output: Tensor = self.stage.chunks[0](x)
        loss = self.loss_of(output, target)
        if self.teach is not None:
            loss = self.teach(batch, output, target, loss)
        value, count = float(loss.array), terms(self.loss, batch.y)
        if not math.isfinite(value):
            self._blame_worker(turn, number, batch, x, value)
            return value, count
        for leaf, _ in self._leaves:
            leaf.grad = None
        if loss.requires_grad:
            with holding_hooks() as reached, part_of_batch(lambda: 1.0):
                run_backward(loss, np.asarray(1.0 / (count or 1.0), dtype=loss.dtype))
            self.reached.update(map(id, reached))
        for leaf, view in self._leaves:
            if leaf.grad is None:
                view[...] = 0.0
        self.correction.add(self.gradients, self.values)
        scale = 1.0
        if self.clip_norm:
            scale = clip_factor(math.sqrt(squared_norm(self.storage.segments, self.gradients)), self.clip_norm)
        self.inner.update(self.gradients, lr=lr, step=number + 1, scale=scale)
        return value, count

    def _blame_worker(self, turn: Turn, number: int, batch: MicroBatch, x: Any, value: float) -> None:
        found = nonfinite_loss(self.stage.chunks[0], x, value, batch)
        error = NumericsError(f"worker {turn.worker}, local step {number + 1}: {found.message}", step=found.step)
        error.micro_batch, error.rows = found.micro_batch, found.rows
        if not self.goes_on:
            raise error
        self.blamed.append(error)
