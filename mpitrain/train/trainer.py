"""The training loop: steps, evaluations, checkpoints, and the record of all three."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpitrain.backend.memory import Swing, pool_in_use
from mpitrain.comm.job.signals import StopRequest
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import Stopped
from mpitrain.parallel.gradients.timeline import SpanMaker, no_span
from mpitrain.parallel.gradients.tuning import Tuning
from mpitrain.parallel.pipeline.runner import Pipeline
from mpitrain.parallel.policies.replicated import Outcome
from mpitrain.train.evaluate import Evaluator
from mpitrain.train.observers.record import Recorder

NO_TALLY = np.zeros(0)
UPDATE = "gradients and update"                                  # a profile cuts it where the last bucket landed


class Step(NamedTuple):
    """One completed update; `loss` is the mean over the global batch, before the update.

    `comm_exposed_s` is that of the rank that waited least: the others waited for slower ranks too, not for messages alone.
    `tally` is that of all mixtures of experts, if there are any: see `nn.MixtureOfExperts.take_tally`.
    """

    loss: float
    lr: float
    grad_norm: float | None
    comm_exposed_s: float
    tally: np.ndarray[Any, Any] = NO_TALLY


class Update(Protocol):
    """A policy of reduction, norm, clipping and optimizer; `step` counts the updates done."""

    step: int
    want_norm: bool

    def begin(self) -> None: ...
    def finish(self) -> Outcome: ...


class Loader(Protocol):
    def iterate(self, start_step: int = 0, stop_step: int | None = None) -> Iterator[tuple[int, list[Any]]]: ...
    def close(self) -> None: ...


@dataclass
class Plan:
    """When things happen, in steps; `steps_per_epoch` gives the epoch of a step."""

    steps: int
    steps_per_epoch: int
    batch_size: int
    eval_every: int
    checkpoint_every: int
    keep_best: bool
    log_every: int

    def is_due(self, every: int, step: int) -> bool:
        return bool(every) and step % every == 0


class Trainer:
    """Runs the steps that are left, from `update.step` to `plan.steps`.

    It knows no ranks, mesh, stage, device or precision: those are inside `pipeline`, `update` and `channel`. `save`, where
    set, writes a checkpoint of everything a resumed run needs and returns when it is on the disk.
    """

    def __init__(self, *, pipeline: Pipeline, update: Update, loader: Loader, evaluator: Evaluator | None, channel: Channel,
                 plan: Plan, recorder: Recorder, tuning: Tuning):
        self.pipeline, self.update, self.loader, self.evaluator = pipeline, update, loader, evaluator
        self.channel, self.plan, self.recorder, self.tuning = channel, plan, recorder, tuning
        self.save: Callable[[dict[str, Any]], None] | None = None
        self.span: SpanMaker = no_span                           # what a profile listens to
        self.memory = Swing(pool_in_use())
        self.stop = StopRequest()
        self.evaluated = True                                    # whether an evaluation that was due has been done
        self.best: tuple[float, int] | None = None               # (lowest validation loss, its step)
        self.metrics: dict[str, float] = {}                      # of the last evaluation
        self.notes: list[str] = []                               # shown when the run starts

    def train_step(self, micro_batches: Sequence[Any]) -> Step:
        self.update.begin()                                      # gradient arenas for this step
        loss = self.pipeline.run(micro_batches, flag=self.stop.asked)    # forward and backward; buckets leave as they fill
        with self.span("compute", UPDATE):
            outcome = self.update.finish()                       # the rest of the exchange, norm, clip, optimizer
        with self.span("compute", "exchange of the loss"):
            tally = self.pipeline.take_tally()
            mean, outcome["comm_exposed_s"] = self.share(loss, outcome["comm_exposed_s"], tally)
        return Step(loss=mean, **outcome, tally=tally)

    def share(self, parts: np.ndarray[Any, Any], exposed_s: float,
              tally: np.ndarray[Any, Any] = NO_TALLY) -> tuple[float, float]:
        """The sum of the micro-batches' parts of the mean loss, and the smallest of the ranks' waiting times, in one message.

        Each rank passes its own parts, and zeros; the sum is exact, and rounded once. `tally` becomes the sum of the ranks'.
        """
        if self.channel.size == 1:
            return math.fsum(parts), exposed_s                   # a message to nobody costs a small model 1 % of its step
        message, end = np.zeros(len(parts) + self.channel.size + len(tally)), len(parts) + self.channel.size
        message[:len(parts)], message[len(parts) + self.channel.rank], message[end:] = parts, exposed_s, tally
        self.channel.allreduce(message, name="loss")
        tally[...] = message[end:]
        return math.fsum(message[:len(parts)]), float(message[len(parts):end].min())

    def fit(self) -> dict[str, float]:
        """Trains to the end and returns the last evaluation. Raises Stopped after a stop request, with a checkpoint saved."""
        self.recorder.start(self.update.step, self.plan, self.notes)
        if not self.evaluated:                                   # the run was stopped between a step and its evaluation
            self.evaluate(self.update.step)
        try:
            batches = self.loader.iterate(self.update.step, self.plan.steps)
            while (batch := self._next(batches)) is not None:
                self.one_step(*batch)
        finally:
            self.loader.close()
        return self.metrics

    def _next(self, batches: Iterator[tuple[int, list[Any]]]) -> tuple[int, list[Any]] | None:
        with self.span("data", "wait for a batch"):
            return next(batches, None)

    def one_step(self, step: int, micro_batches: Sequence[Any]) -> None:
        plan, done = self.plan, step + 1
        last = done == plan.steps
        logging = last or plan.is_due(plan.log_every, done)
        self.update.want_norm = logging or plan.is_due(plan.checkpoint_every, done)    # its gradient was finite, then
        began = time.perf_counter()
        self.memory.begin(self.pipeline.sent_bytes)
        with self.span("step", f"step {done}"):
            result = self.train_step(micro_batches)
        self.memory.end(self.pipeline.sent_bytes)
        seconds = time.perf_counter() - began
        self.recorder.step(done, result._asdict(), seconds, due=logging)
        self.tuning.after_step(seconds)
        self.evaluated = self.evaluator is None or not (last or plan.is_due(plan.eval_every, done))
        if self.pipeline.flag > 0:                               # time is short: evaluate when the run goes on
            self.checkpoint(done)
            raise Stopped("stopped on request with a complete checkpoint; start it again with --resume", step=done)
        improved = self.evaluate(done) if not self.evaluated else False
        if last or plan.is_due(plan.checkpoint_every, done) or (improved and plan.keep_best):
            self.checkpoint(done)

    def evaluate(self, done: int) -> bool:
        """Writes the validation metrics down; whether their loss is the lowest so far, which NaN and infinity never are."""
        assert self.evaluator is not None
        began = time.perf_counter()
        with self.span("evaluation", f"evaluation at step {done}"):
            self.metrics = self.evaluator.run()
        self.recorder.evaluation(done, self.metrics, time.perf_counter() - began)
        self.evaluated = True
        loss = self.metrics["loss"]
        improved = math.isfinite(loss) and (self.best is None or loss < self.best[0])
        if improved:
            self.best = (loss, done)
        return improved

    def checkpoint(self, done: int) -> None:
        if self.save is not None:
            with self.span("checkpoint", f"checkpoint of step {done}"):
                self.recorder.sync()                             # the metrics of these steps must survive with them
                self.save({"step": done, "best": list(self.best) if self.best else None, "evaluated": self.evaluated,
                           "metrics": {name: value for name, value in self.metrics.items() if math.isfinite(value)}})
            self.recorder.saved(done)
