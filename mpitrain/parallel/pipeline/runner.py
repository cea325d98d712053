"""Runs one stage's forwards and backwards in the order a schedule gives. With one stage that is gradient accumulation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpitrain.autograd import Deferred, Tensor, in_single, part_of_batch, run_backward
from mpitrain.backend import Array, asnumpy, is_float, random
from mpitrain.comm.messages.channel import Channel
from mpitrain.data import MicroBatch
from mpitrain.errors import GraphError, NumericsError, ShapeError, say_own_place
from mpitrain.nn import mixtures
from mpitrain.nn.loss import Loss, terms
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.timeline import SpanMaker, no_span
from mpitrain.parallel.pipeline.feed import Feed
from mpitrain.parallel.pipeline.graphs import Graphs
from mpitrain.parallel.pipeline.late import LateLosses
from mpitrain.parallel.pipeline.nonfinite import is_finite, nonfinite_loss
from mpitrain.parallel.pipeline.step_count import StepCount, without_terms
from mpitrain.parallel.pipeline.tallies import Tallies
from mpitrain.placement.stages import Stage
from mpitrain.schedules.pipeline import Action, Schedule, one_f_one_b
from mpitrain.schedules.pipeline_check import actions_of, splits_backward

if TYPE_CHECKING:
    from mpitrain.parallel.pipeline.neighbours import Neighbours

Parts: TypeAlias = "np.ndarray[Any, Any] | LateLosses"


class Pipeline:
    """The stage's forward and backward over the micro-batches of one step.

    Each micro-batch's loss is a sum; its gradient starts from 1 / (the count over the ranks of a `site`, of how many), so the
    exchange only ever adds, and batches of uneven size stay exact. Terms that layers add to the loss (`autograd.batch_share`)
    are weighted by the rows of a micro-batch over those of the site. The schedule names forwards (F) and
    backwards (B), or halves of them (B, W); `neighbours` (None where the stage is the whole model) adds receives and sends.

    A loss that is not finite raises NumericsError, or, where the run `goes_on`, makes all gradients of the micro-batch NaN, which
    every rank sees in the norm; `blamed` has the errors then.
    """

    def __init__(self, stage: Stage, loss: Loss, channel: Channel, reducer: GradientReducer, feed: Feed, *, n_micro: int,
                 seed: int = 0, schedule: Schedule = one_f_one_b, after_forward: Callable[[int, int], None] | None = None,
                 neighbours: Neighbours | None = None, counts: bool = True, span: SpanMaker = no_span, goes_on: bool = False,
                 site: tuple[int, int] = (0, 1)):
        self.stage, self.loss, self.channel, self.reducer, self.feed = stage, loss, channel, reducer, feed
        self.seed, self.schedule, self.n_micro = seed, schedule, n_micro
        self.after_forward, self.neighbours = after_forward, neighbours
        self.teach: Callable[[MicroBatch, Tensor, Array, Tensor], Tensor] | None = None     # its output, target, loss -> the loss
        self.scale: Callable[[Array], Array] | None = None  # The first gradient of a backward -> that times the loss scale.
        self.counts = counts and stage.is_last              # Whether this rank's terms of the loss count.
        self.span, self.goes_on = span, goes_on
        self.graphs: Graphs | None = None                   # Captured micro-batches, where the stage is the whole model.
        self.reached: set[int] = set()                      # Parameters, by identity, that backwards of their own have reached.
        self.blamed: list[NumericsError] = []               # The errors of the last step on this rank.
        self.without_graph = 0                              # The last virtual stage whose output did not depend on its input.
        self.count = 0.0                                    # Terms of the loss in the last step, over all ranks.
        self.flags = (0.0, 0.0)                             # The sums over ranks of the flags that `run` got.
        self.tallies = Tallies(stage)
        self.waited_s = 0.0                                 # Seconds of the last step spent waiting for other ranks.
        self._programs: dict[int, list[Action]] = {}
        self._micro: Sequence[MicroBatch] = ()
        self._inputs: dict[tuple[int, int], Tensor] = {}    # Tensors received, by (chunk, micro-batch).
        self._outputs: dict[tuple[int, int], Tensor] = {}   # Outputs made of them.
        self._deferred: dict[tuple[int, int], Deferred] = {}     # Backwards whose parameters' half is to come.
        self._losses = np.zeros(0)
        self._is_late = feed.device.xp is not np and stage.n_virtual == 1 and self.counts and not goes_on
        self._late: list[Array] = []                        # Losses of this step that stay on the device.
        self._lost: set[int] = set()                        # Micro-batches whose loss is not finite.
        self._split = False                                 # Whether backward runs as two calls in this step.
        self._counted = StepCount(channel, n_micro, site)
        self._travels = any(layer.across is not None for _, layer in mixtures(stage.model))     # Other ranks wait for our rows.

    def run(self, micro_batches: Sequence[MicroBatch], *, flags: tuple[float, float] = (0.0, 0.0)) -> Parts:
        """Each micro-batch's part of the global mean loss, (`n_micro`,) float64, zero where it is another rank's; from a device
        `LateLosses`, which has them, unless the run `goes_on` or the stage is a part of the model.

        Gradients are summed into the reducer, whose buckets leave as they fill.
        `flags` travel with the count and come back as sums over ranks, in `self.flags`.
        """
        counted = micro_batches if self.counts else ()
        numbers = [(m.index, terms(self.loss, self.feed.part(m.y))) for m in counted]
        self._counted.begin(numbers, sum(len(m.x) for m in counted), flags)
        self._micro, self._losses, self.waited_s = micro_batches, np.zeros(self.n_micro), 0.0
        self._lost, self.blamed, self._late = set(), [], []
        if self.neighbours is not None:
            self.neighbours.link.finish()                      # Sends of the last step, which did not wait for them.
        program = self._program(len(micro_batches))
        self._split = splits_backward(program)
        for i, action in enumerate(program):
            if self.neighbours is not None:
                self._expect(program[i:i + 2])
            if self.graphs is not None:
                if action.kind == "F":
                    self._at_once(action)
            elif action.kind == "F":
                self._forward(action)
            elif action.kind == "B":
                self._backward(action)
            else:
                self._weights(action)
        if not self._total() and self._losses.any():
            raise without_terms(self.loss, math.fsum(self._losses))
        self.flags = self._counted.flags
        if self._late:
            return LateLosses(self.feed.device, self._late, micro_batches, self.n_micro, self.count,
                              partial(without_terms, self.loss))
        return self._losses / (self.count or 1.0)

    @property
    def sent_bytes(self) -> int:
        """Bytes of messages to other stages that are still in memory."""
        return 0 if self.neighbours is None else self.neighbours.link.sent_bytes

    def _program(self, n: int) -> list[Action]:
        """The actions of this stage in a step of `n` micro-batches."""
        if n not in self._programs:
            stage = self.stage
            self._programs[n] = list(actions_of(self.schedule, stage.index, stage.n_stages, n, len(stage.chunks)))
        return self._programs[n]

    def _at_once(self, action: Action) -> None:
        """Forward and backward of a micro-batch, by a launch of their graph where there is one."""
        assert self.graphs is not None
        micro = self._micro[action.micro]
        self._begin_gradients(action)
        with self.span("compute", f"forward and backward {micro.index}"):
            loss = self.graphs.run(micro, self._total, last=action.micro == len(self._micro) - 1)
        if loss is None:
            self._forward(action)
            self._backward(action, begun=True)
        else:
            self._late.append(loss)

    def _forward(self, action: Action) -> None:
        micro, key = self._micro[action.micro], (action.chunk, action.micro)
        virtual = self.stage.virtual(action.chunk)
        x = self.feed.tensors_of(micro) if virtual == 0 else self._receive(action)
        with self.span("compute", f"forward {micro.index}"):
            output = self.forward(micro, x, action.chunk)
        if virtual < self.stage.n_virtual - 1:
            assert self.neighbours is not None
            self.neighbours.send_forward(output, virtual, action.micro, len(micro.x))
        elif self._is_late:
            self._late.append(output.array)
        else:
            value = self._value(output, micro, x, action.chunk)
            self._losses[micro.index] = value if self.counts else 0.0
        self._inputs[key], self._outputs[key] = x, output
        if self.after_forward is not None:
            self.after_forward(micro.index, action.chunk)

    def _backward(self, action: Action, *, begun: bool = False) -> None:
        key, virtual = (action.chunk, action.micro), self.stage.virtual(action.chunk)
        output, x = self._outputs.pop(key), self._inputs.pop(key)
        if virtual == self.stage.n_virtual - 1:
            grad = output.xp.asarray(1.0 / (self._total() or 1.0), dtype=output.dtype)
            grad = grad if self.scale is None else self.scale(grad)
        else:
            grad = self._receive(action).array
        split, rest = self._split, None
        with self.span("compute", f"backward {self._micro[action.micro].index}"):
            if not (split or begun):
                self._begin_gradients(action)
            lost = self._is_lost(action, grad, x, output)
            if lost and self.goes_on:
                grad = output.xp.full(output.shape, math.nan, output.dtype)
            if output.requires_grad and (self._travels or self.goes_on or not lost):
                with part_of_batch(lambda: self._share(action)):
                    rest = self.differentiate(output, grad, self._micro[action.micro])
            if x.requires_grad and x.grad is None:            # Zeros travel then, like any gradient.
                self.without_graph = virtual
            if lost and virtual:
                x.grad = x.xp.full(x.shape, math.nan, x.dtype)
        if rest is not None:
            self._deferred[key] = rest
        if virtual > 0:
            assert self.neighbours is not None
            self.neighbours.send_backward(x, virtual, action.micro)

    def differentiate(self, output: Tensor, grad: Array, micro: MicroBatch) -> Deferred | None:
        """Backward of a micro-batch's output; its second half, where it runs as two calls."""
        return run_backward(output, grad, progress=self.reducer.progress, split=self._split)

    def _weights(self, action: Action) -> None:
        rest = self._deferred.pop((action.chunk, action.micro), None)
        with self.span("compute", f"weight gradient {self._micro[action.micro].index}"):
            self._begin_gradients(action)
            if rest is not None:
                rest.run()

    def _begin_gradients(self, action: Action) -> None:
        last = action.micro == len(self._micro) - 1
        self.reducer.begin_micro_batch(self._micro[action.micro].index, last=last, chunk=action.chunk)

    def _expect(self, actions: Sequence[Action]) -> None:
        """Posts the receives of this action and the next, so that their messages travel while this one computes."""
        assert self.neighbours is not None
        for action in actions:
            virtual = self.stage.virtual(action.chunk)
            if action.kind == "F" and virtual > 0:
                self.neighbours.expect_forward(virtual, action.micro, len(self._micro[action.micro].x), wait=action is actions[0])
            elif action.kind == "B" and virtual < self.stage.n_virtual - 1:
                output = self._outputs.get((action.chunk, action.micro))
                if output is not None:
                    self.neighbours.expect_backward(output, virtual, action.micro)

    def _receive(self, action: Action) -> Tensor:
        assert self.neighbours is not None
        began = time.perf_counter()
        with self.span("wait", f"wait for {action}"):
            array = self.feed.device.put(self.neighbours.take(action.kind, self.stage.virtual(action.chunk), action.micro))
        self.waited_s += time.perf_counter() - began
        needs = action.kind == "F" and is_float(array.dtype)
        return Tensor(array, requires_grad=needs)

    def _await_count(self) -> None:
        """Waits for what all ranks count in this step."""
        began = time.perf_counter()
        with self.span("compute", "exchange of the count"):
            self._counted.wait()
        self.waited_s += time.perf_counter() - began

    def _total(self) -> float:
        """The terms of the loss over all ranks of this site, which may be a sum of weights."""
        if self._counted.travels:
            self._await_count()
        self.count = self._counted.total
        return self._counted.of_site

    def _share(self, action: Action) -> Any:
        """The micro-batch's share of the rows of its site, times the scale of the loss, where there is one."""
        if self._counted.travels:
            self._await_count()
        part = len(self._micro[action.micro].x) / max(self._counted.rows, 1.0)
        return part if self.scale is None else self.scale(self.feed.device.xp.asarray(part, dtype="float32"))

    def forward(self, micro: MicroBatch, x: Tensor, chunk: int = 0) -> Tensor:
        """The output of one chunk, of the last one the summed loss of the micro-batch.

        Random numbers are keyed by (seed, step, row of the global batch, layer).
        """
        rows = np.arange(micro.first, micro.first + len(micro.x), dtype=np.uint64)
        with random.use(random.Scope(self.seed, micro.step, rows)):
            try:
                output: Tensor = self.stage.chunks[chunk](x)
            except (GraphError, ShapeError) as error:
                say_own_place(error)
                raise
        if self.stage.virtual(chunk) < self.stage.n_virtual - 1:
            return output
        target = self.feed.targets_of(micro)
        loss = self.loss_of(output, target)
        return loss if self.teach is None else self.teach(micro, output, target, loss)

    def loss_of(self, output: Tensor, target: Array) -> Tensor:
        """The summed loss of a micro-batch's output; of one in 16 bits it has 32."""
        loss: Tensor = self.loss(output if getattr(self.loss, "takes_half", False) else in_single(output), target)
        return loss

    def _value(self, loss: Tensor, micro: MicroBatch, x: Tensor, chunk: int) -> float:
        """The summed loss as a number. NumericsError where it is not finite because of this stage.

        Where an earlier stage made it so, that stage raises: this one sends a gradient of NaN back to it.
        """
        value = float(asnumpy(loss.array))
        if not math.isfinite(value):
            self._lost.add(micro.index)
            self._blame(micro, x, value, chunk)
            return math.nan
        return value

    def _blame(self, micro: MicroBatch, x: Any, value: float, chunk: int) -> None:
        """NumericsError, unless the run goes on, where this stage, or its input `x` from the data, made the loss not finite."""
        if self.stage.virtual(chunk) and not is_finite(x.array):
            return
        error = nonfinite_loss(self.stage.chunks[chunk], x, value, micro)
        if not self.goes_on:
            raise error
        self.blamed.append(error)

    def _is_lost(self, action: Action, grad: Array, x: Any, output: Tensor) -> bool:
        """Whether a micro-batch's loss is not finite because of `x`, the output of an earlier stage. NumericsError where this
        stage made it so."""
        micro, virtual = self._micro[action.micro], self.stage.virtual(action.chunk)
        if virtual == self.stage.n_virtual - 1:
            return micro.index in self._lost
        if not np.isnan(asnumpy(grad.reshape(-1)[:1])).any() or is_finite(output.array):
            return False
        self._blame(micro, x, math.nan, action.chunk)
        return True
