"""Evaluation over all ranks, with exact global metrics.

The rows are cut into fixed chunks, chunk c goes to rank c mod n, and each chunk's sums stand in a table of their own row.
Adding the ranks' tables adds zeros to each number, and the rows are then summed exactly, so the result has the same bits at
any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor, no_grad
from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.comm.messages.channel import Channel
from mpitrain.nn.loss import Loss
from mpitrain.parallel.gradients.timeline import SpanMaker, no_span
from mpitrain.parallel.pipeline.inference import Inference


class Evaluator:
    """The mean loss, and for classes the accuracy, of a model over some rows of data; every row counts once.

    `read(c)` gives chunk c of `n_chunks` as host arrays (x, y). `place` is this rank's number among `n_places` that have a model
    each, and `counts` says whether it is the one rank that counts for its model. `classes(output)` is the class of the largest
    output of each row; it and `loss` are called alike on all ranks that have outputs. `in_step`: all places run the model equally
    often, since each has a part of its parameters; those with a chunk less repeat one.
    """

    def __init__(self, inference: Inference, loss: Loss, read: Callable[[int], tuple[Any, Any]], n_chunks: int,
                 channel: Channel, *, place: int, n_places: int, counts: bool = True,
                 classes: Callable[[Array], Array] | None = None, in_step: bool = False, span: SpanMaker = no_span):
        self.inference, self.loss, self.read, self.n_chunks, self.channel = inference, loss, read, n_chunks, channel
        self.place, self.n_places, self.counts, self.in_step = place, n_places, counts, in_step
        self.classes, self.span = classes or _largest, span

    def run(self) -> dict[str, float]:
        """``{"loss": ..., "accuracy": ...}``; accuracy only where the targets are classes. It communicates."""
        table = np.zeros((self.n_chunks, 3))                       # loss sum, terms, correct
        mine = [*range(self.place, self.n_chunks, self.n_places)]
        most = -(-self.n_chunks // self.n_places)
        again = [self.n_chunks - 1] * (most - len(mine)) if self.in_step else []
        for i, (output, y) in enumerate(self.inference.run(map(self._read, mine + again))):
            sums = self._sums(output, y)
            if self.counts and i < len(mine):
                table[mine[i]] = sums
        self.channel.allreduce(table.reshape(-1), name="evaluation")
        loss, count, correct = (math.fsum(column) for column in table.T)
        metrics = {"loss": loss / max(count, 1.0)}
        if self.loss.kind == "classes":
            metrics["accuracy"] = correct / max(count, 1.0)
        return metrics

    def _read(self, chunk: int) -> tuple[Any, Any]:
        with self.span("evaluation", f"read chunk {chunk}"):
            return self.read(chunk)

    def _sums(self, output: Tensor, y: Any) -> tuple[float, float, float]:
        target = self.inference.feed.targets(y)
        with no_grad():
            loss = float(asnumpy(self.loss(output, target).array))
        correct = 0.0
        if self.loss.kind == "classes":
            right = self.classes(output.array) == target
            ignored = getattr(self.loss, "ignore_index", None)
            correct = float((right if ignored is None else right & (target != ignored)).sum())
        return loss, float(self.loss.count(self.inference.feed.part(y))), correct


def _largest(output: Array) -> Array:
    found: Array = array_module(output).argmax(output, axis=-1)
    return found
