"""The training loop: steps, evaluations and checkpoints, of which observers are told."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mpitrain.checkpoint.saver import Saver
from mpitrain.comm.job.signals import StopRequest
from mpitrain.comm.messages.channel import Channel
from mpitrain.data import Loader, MicroBatch
from mpitrain.errors import NumericsError, Stopped, Terminated
from mpitrain.optim.schedule import Adaptive
from mpitrain.parallel.gradients.timeline import SpanMaker, no_span
from mpitrain.parallel.pipeline.late import LateLosses
from mpitrain.parallel.pipeline.runner import Parts, Pipeline
from mpitrain.parallel.policies.policy import Policy
from mpitrain.train.bad_steps import BadSteps
from mpitrain.train.evaluate import Evaluator
from mpitrain.train.intervals import Pauses, Plan, Step
from mpitrain.train.loss_message import LossMessage
from mpitrain.train.observers import Observer, Watched
from mpitrain.train.patience import Patience, is_better

Batches: TypeAlias = Iterator[tuple[int, list[MicroBatch]]]
UPDATE = "gradients and update"                                  # a profile cuts this span where the last bucket landed


class Trainer:
    """Runs the remaining steps, from `update.step` to `plan.steps`.

    It knows no ranks, mesh, stage, device or precision: those are inside `pipeline`, `update` and `channel`. `saver`, where
    set, writes checkpoints of everything a resumed run needs, while training goes on.
    """

    def __init__(self, *, pipeline: Pipeline, update: Policy, loader: Loader, evaluator: Evaluator | None, channel: Channel,
                 plan: Plan, span: SpanMaker = no_span):
        self.pipeline, self.update, self.loader, self.evaluator = pipeline, update, loader, evaluator
        self.channel, self.plan, self.span, self.bad_steps = channel, plan, span, BadSteps(loader, channel)
        self.share = LossMessage(channel)                        # adds up the parts of the loss over ranks
        self.observers: list[Observer] = []
        self.folder: Path | None = None                          # the run folder, for observers
        self.saver: Saver | None = None
        self.stop = StopRequest()
        self.weights: Callable[[], AbstractContextManager[None]] = nullcontext     # entered while a checkpoint is taken
        self.ahead: Callable[[Batches], Batches] | None = None   # Brings batches to a device before they are asked for.
        self.evaluated = True                                    # False while an evaluation is due
        self.judge = "loss", False                               # the metric of the best checkpoint, and whether more is better
        self.best: tuple[float, int] | None = None               # (its best value, the step of that)
        self.patience: Patience | None = None                    # ends the run early
        self.pauses = Pauses()                                   # steps after which it may pause
        self.metrics: dict[str, float] = {}                      # metrics of the last evaluation
        self._began, self._loaded_s = time.perf_counter(), 0.0   # when work on the step began, and its wait for data
        self._late: LateLosses | None = None                     # those of the last step, where nobody has waited for them
        self.more: dict[str, Any] = {}                           # values of a step that observers add to its line
        self.notes: list[str] = []                               # lines told when the run starts
        self.found: list[tuple[Observer, Any]] = []              # observers with what their `finish` returned, for run.json

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> Step:
        self.update.begin()                                      # gradient arenas for this step
        loss = self.pipeline.run(micro_batches, flags=self.flags)    # forward and backward; buckets leave as they fill
        with self.span("compute", UPDATE):
            outcome = self.update.finish(partial(self.again, micro_batches, loss))   # exchange, norm, clip, optimizer
        with self.span("compute", "exchange of the loss"):
            tally, exposed_s = self.pipeline.tallies.take(), outcome["comm_exposed_s"]
            worked_s = time.perf_counter() - self._began - exposed_s - self.pipeline.waited_s
            mean, outcome["comm_exposed_s"], worked, loaded = self.share(loss, (exposed_s, worked_s, self._loaded_s), tally)
        return Step(mean=mean, **outcome, tally=tally, worked=worked, loaded=loaded)

    def again(self, micro_batches: Sequence[MicroBatch], parts: Parts, begun: bool) -> tuple[float, Any]:
        """The mean loss of a step's batch where the parameters are, over all ranks, and its gradient. If `begun`, forward and
        backward have run, and `parts` are the micro-batches' parts of the loss; else it may be NaN: the optimizer has moved."""
        if not begun:
            self.update.begin()
            before, self.pipeline.goes_on = self.pipeline.goes_on, True      # A place that was only tried ends no run.
            parts = self.pipeline.run(micro_batches, flags=self.flags)
            self.pipeline.goes_on = before
            self.update.reducer.finish()
        tally = self.pipeline.tallies.keep()                  # The step's own is that of its first forward.
        mean = self.share(parts, (0.0, 0.0, 0.0), np.zeros_like(tally))[0]
        return float(mean), self.update.reducer.gradients

    @property
    def flags(self) -> tuple[bool, bool]:
        """Whether this rank wants to stop, and whether its thread has written what there was to write: ranks add them up."""
        return self.stop.asked, self.saver is not None and self.saver.ready

    def fit(self) -> dict[str, float]:
        """Trains to the end and returns the last evaluation. Raises Stopped after a stop request, with a checkpoint saved."""
        done = self.update.step
        run = Watched(self.channel.rank, self.channel.size, done, self.plan, self.folder, self.tell, self.more)
        try:
            for observer in self.observers:
                observer.begin(run)
            for note in [f"resumed at step {done}"] * (done > 0) + self.notes:
                self.tell(note)
            if self.bad_steps.go_back is not None and not done:
                self.checkpoint(0, at_once=True)                 # the beginning is a state to go back to, too
            self._run()
            self._finish()
        finally:
            if self.saver is not None:
                self.saver.close()
            self.loader.close()
            for observer in self.observers:
                observer.close()
        return self.metrics

    def tell(self, text: str) -> None:
        """Shows a line to whoever follows the run."""
        for observer in self.observers:
            observer.message(text)

    def terminated(self) -> Terminated:
        """The error of a job that SIGTERM ends; it says what is kept. Another thread may ask."""
        step = self.update.step
        kept = None if self.saver is None else self.saver.newest()
        words = "there is no checkpoint yet, so the run starts anew" if kept is None else \
            f"the checkpoint of step {kept} stands, and {step - kept} steps are lost"
        return Terminated(f"SIGTERM ends the run at once, since SIGKILL often follows; {words}. SIGUSR1 ends a run with a "
                          "checkpoint", step=step)

    def _run(self) -> None:
        if not self.evaluated:                                   # the run was stopped between a step and its evaluation
            self.evaluate(self.update.step)
            if self.update.step in self.pauses.steps:
                self.checkpoint(self.update.step, at_once=True)
        if not self.over:
            self.pauses.ask(self.update.step, self.metrics)
        batches = self.loader.iterate(self.update.step, self.plan.steps)
        if self.ahead is not None:
            batches = self.ahead(batches)
        while not self.over and (batch := self._next(batches)) is not None:
            self.one_step(*batch)

    @property
    def over(self) -> str:
        """Why the run ends before its last step; "" where it does not."""
        return "it is paused" if self.pauses.paused else "" if self.patience is None else self.patience.reason

    def _next(self, batches: Iterator[tuple[int, list[MicroBatch]]]) -> tuple[int, list[MicroBatch]] | None:
        self._began = time.perf_counter()
        with self.span("data", "wait for a batch"):
            batch = next(batches, None)
        self._loaded_s = time.perf_counter() - self._began
        return batch

    def _finish(self) -> None:
        self._wait_for_losses()
        if self.over:
            self.tell(f"step {self.update.step}  the run ends: {self.over}")
        self.found = [(observer, observer.finish(self.update.step)) for observer in self.observers]

    def one_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> None:
        plan, done = self.plan, step + 1
        # A checkpoint's gradient was finite, then; and a step is left out by the norm, which all ranks have alike.
        self.update.want_norm = plan.logs(done) or plan.saves(done) or self.update.goes_on
        for observer in self.observers:
            observer.before_step(done)
        began = time.perf_counter()
        try:
            with self.span("step", f"step {done}"):
                result = self.train_step(micro_batches)
        except NumericsError as error:
            raise self._ends(done, error) from None
        if self.update.blamed:
            if self.saver is not None and self.bad_steps.go_back is not None:
                self._saved(self.saver.finish())                 # the state to go back to may still be on its way to the disk
            self.bad_steps.leave_out(self.folder, done, self.pipeline.blamed, self.update.blamed, self.tell)
        self.more.clear()
        self.more.update(self.pipeline.tallies.told(result.tally, result.grad_norm))
        if self.bad_steps.skipped:
            result = result._replace(skipped=self.bad_steps.skipped)
        self._check(result, done)
        seconds = time.perf_counter() - began
        try:
            for observer in self.observers:
                observer.after_step(done, result, seconds)
        except NumericsError as error:                           # of the loss, which one has asked for
            raise self._ends(done, error) from None
        stopping, ready = self.pipeline.flags
        if ready == self.channel.size and self.saver is not None and self.saver.busy:
            self._saved(self.saver.advance())
        self.evaluated = self.evaluator is None or not plan.evaluates(done)
        if stopping > 0:                                         # time is short: evaluate when the run goes on
            self.checkpoint(done, at_once=True)
            self._finish()
            raise Stopped("stopped on request with a complete checkpoint; start it again with --resume", step=done)
        improved = self.evaluate(done) if not self.evaluated else False
        at_once = done == plan.steps or bool(self.over) or done in self.pauses.steps
        if plan.saves(done) or (improved and plan.keep_best) or at_once:
            self.checkpoint(done, at_once=at_once)
        if not self.over:
            self.pauses.ask(done, self.metrics)

    def _check(self, result: Step, done: int) -> None:
        """Waits for the losses of the step before, if they are still on their way: this step is launched by now. Its own, and
        its norm, are waited for where it is looked at, or saved. NumericsError where one is not finite."""
        before, self._late = self._late, result.mean if isinstance(result.mean, LateLosses) else None
        if before is not None:
            try:
                before.parts()
            except NumericsError as error:
                raise self._ends(done, error) from None
        if self.plan.logs(done) or self.plan.evaluates(done):
            self._wait_for_losses()

    def _wait_for_losses(self) -> None:
        late, self._late = self._late, None
        try:
            if late is not None:
                late.parts()
            self.update.wait()
        except NumericsError as error:
            raise self._ends(self.update.step, error) from None

    def _ends(self, done: int, error: NumericsError) -> NumericsError:
        """Records the step whose number was not finite: `done`, or on a device one before it, whose loss says more than that its
        gradient was not finite either. Returns the error to be raised."""
        late, self._late = self._late, None
        try:
            if late is not None:
                late.parts()
        except NumericsError as found:
            error = found
        self.bad_steps.stop(self.folder, error.step or done, error)
        return error

    def evaluate(self, done: int) -> bool:
        """The validation metrics; whether that of `judge` is the best so far, which NaN and infinity never are."""
        assert self.evaluator is not None
        began = time.perf_counter()
        with self.span("evaluation", f"evaluation at step {done}"):
            self.metrics = self.evaluator.run()
        seconds = time.perf_counter() - began
        for observer in self.observers:
            observer.after_evaluation(done, self.metrics, seconds)
        self.evaluated = True
        if isinstance(self.update.rate, Adaptive):
            self.update.rate.observe(self.metrics["loss"])
        if self.patience is not None:
            self.patience.observe(done, self.metrics)
        name, higher = self.judge
        improved = is_better(value := self.metrics[name], self.best[0] if self.best else None, higher)
        if improved:
            self.best = (value, done)
        return improved

    def checkpoint(self, done: int, *, at_once: bool = False) -> None:
        """Begins the checkpoint of a step; `at_once` also waits for it."""
        saver = self.saver
        if saver is None:
            return
        self._wait_for_losses()                                  # A state that came of NaN is not saved.
        with self.span("checkpoint", f"checkpoint of step {done}"):
            self._saved(saver.finish())                          # the one before, if it is still being written
            began = time.perf_counter()
            for observer in self.observers:
                observer.before_checkpoint(done)
            with self.weights():
                saver.start(done, self.meta(done), at_once=at_once, since=began)
                if at_once or not saver.asynchronous:
                    self._saved(saver.finish())

    def meta(self, done: int) -> dict[str, Any]:
        """What a run that goes on after this step has to know besides the arrays."""
        metrics = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {"step": done, "best": list(self.best) if self.best else None, "evaluated": self.evaluated, "metrics": metrics,
                "best_metric": self.judge[0], **({"stop": self.patience.record()} if self.patience is not None else {}),
                **({"rate": self.update.rate.record()} if isinstance(self.update.rate, Adaptive) else {}),
                **self.bad_steps.record(), **({"privacy": self.update.private.record()} if self.update.private else {})}

    def _saved(self, step: int | None) -> None:
        if step is not None:
            for observer in self.observers:
                observer.after_checkpoint(step)
