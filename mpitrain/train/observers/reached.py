"""Does training reach the parameters? A model whose output has no graph would train nothing, and end well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpitrain.comm.face import Objects
from mpitrain.comm.job import guard
from mpitrain.errors import GraphError
from mpitrain.parallel.pipeline.runner import Pipeline
from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer, Watched

LISTED = 3                               # a line lists at most so many parameters
NOTHING = ("no parameter of the model got a gradient in the first step, so training would change nothing: the loss does not "
           "depend on them through a graph; compute the model's output with mpitrain.ops, or methods of Tensor, on Tensors all "
           "the way, not with NumPy on their arrays")


class Reached(Observer):
    """Looks at the first step for the parameters that no gradient reached on any rank, and tells their names.

    GraphError, on all ranks, where that is true of all. Frozen parameters are left out.
    """

    def __init__(self, pipeline: Pipeline, channel: Objects):
        self.pipeline, self.channel = pipeline, channel
        self._waiting = {p.key: p for p in pipeline.stage.model.parameters() if p.requires_grad}
        self._asked: Sequence[Any] = ()                       # parameters with our hook
        self._found: set[str] = set()
        self._looks = True

    def begin(self, run: Watched) -> None:
        self._tell, self._more = run.tell, run.more
        self._asked = list(self._waiting.values())
        for parameter in self._asked:
            parameter.grad_hooks.append(self._reached)

    def _reached(self, parameter: Any) -> None:
        self._found.add(parameter.key)

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        if not self._more.get("workers", 1):                 # A round in which nobody trained tells nothing.
            return
        if self._looks and (fields.grad_norm is None or math.isfinite(fields.grad_norm)):
            self._judge()

    def _judge(self) -> None:
        """It communicates: an expert, or a rank's micro-batches, may have got no rows while others did."""
        self.close()
        stage = self.pipeline.stage
        self._found |= {key for key, parameter in self._waiting.items() if id(parameter) in self.pipeline.reached}
        if stage.n_stages > 1:                                # Stages before one without a graph got zeros from it.
            last = max(self.channel.gather_objects(self.pipeline.without_graph))
            self._found -= {p.key for i, chunk in enumerate(stage.chunks) if stage.virtual(i) < last for p in chunk.parameters()}
        missed = sorted(self._waiting.keys() - self._found)
        everyone = self.channel.gather_objects([len(self._waiting), missed])
        suspects = {name for _, names in everyone for name in names}
        if not suspects:
            return
        found = {name for names in self.channel.gather_objects(sorted(suspects & self._found)) for name in names}
        missed = sorted(suspects - found)
        if missed and all(n == len(names) and not found.intersection(names) for n, names in everyone):
            with guard.symmetric():
                raise GraphError(NOTHING)
        if missed:
            more = ", ..." if len(missed) > LISTED else ""
            self._tell(f"{len(missed)} of the model's parameters got no gradient in the first step, so at most weight decay "
                       f"changes them: {', '.join(missed[:LISTED])}{more}; where that is meant, set their requires_grad = False")

    def close(self) -> None:
        self._looks = False
        for parameter in self._asked:
            parameter.grad_hooks = [hook for hook in parameter.grad_hooks if hook != self._reached]
        self._asked = ()
