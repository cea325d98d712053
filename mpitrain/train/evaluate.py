"""Evaluation over all ranks, with exact global metrics.

The rows are cut into fixed chunks, chunk c goes to rank c mod n, and each chunk's sums stand in a table of their own row.
Adding the ranks' tables adds zeros to each number, and the rows are then summed exactly, so the result has the same bits at
any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.autograd import Tensor
from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.errors import print_warning
from mpitrain.nn.loss import Loss, terms
from mpitrain.parallel.connect import ParallelContext
from mpitrain.parallel.gradients.timeline import SpanMaker, no_span
from mpitrain.parallel.pipeline.inference import Inference, given_to

if TYPE_CHECKING:
    from mpitrain.train.build.inputs import Inputs
    from mpitrain.train.measure import Measure


PLACES = [0, 2, 3, 4]                        # of the table's numbers, those that are sums over outputs


class Evaluator:
    """The mean loss, and for classes the accuracy, of a model over some rows of data; every row counts once.

    `read(c)` gives chunk c of `n_chunks` as host arrays (x, y). `loss` is called alike on all ranks that have outputs.
    `cuts_parameters`: each place of the mesh has a part of the model's parameters, so all run it equally often, as they do where
    they have experts for each other; those with a chunk less repeat one. `measure` has further metrics.
    """

    tables: dict[str, Any]                   # metrics of the last evaluation that are no numbers

    def __init__(self, inference: Inference, loss: Loss, read: Callable[[int], tuple[Any, Any]], n_chunks: int,
                 context: ParallelContext, *, cuts_parameters: bool, span: SpanMaker = no_span, measure: Measure | None = None):
        self.inference, self.loss, self.read, self.n_chunks, self.context = inference, loss, read, n_chunks, context
        self.in_step, self.span = cuts_parameters or context.placement.in_step, span
        self.measure, self.tables = measure, {}
        self.weights: Callable[[], AbstractContextManager[None]] = nullcontext      # entered around each evaluation

    def run(self) -> dict[str, float]:
        """``{"loss": ..., "accuracy": ...}``, accuracy only where the targets are classes, and those of `measure` that are
        numbers; others stand in `tables`. It communicates."""
        with self.weights():
            return self._run()

    def _run(self) -> dict[str, float]:
        table = np.zeros((self.n_chunks, 5))                       # loss sum, terms, correct, labels, labels without a class
        place, n_places = self.context.mesh.place, self.context.mesh.n_places
        mine = [*range(place, self.n_chunks, n_places)]
        most = -(-self.n_chunks // n_places)
        again = [self.n_chunks - 1] * (most - len(mine)) if self.in_step else []
        there: dict[int, Array] = {}                               # what a device has of each chunk: read at the end
        for i, (output, y) in enumerate(self.inference.run(map(self._read, mine + again))):
            sums, n_terms = self._sums(output, y)
            if self.measure is not None:
                self.measure.see(mine[i] if i < len(mine) else None, output, self.inference.feed.part(y))
            if self.context.counts and i < len(mine):
                table[mine[i], 1] = n_terms
                if type(sums) is np.ndarray:
                    table[mine[i], PLACES] = sums
                else:
                    there[mine[i]] = sums
        if there:
            table[[[chunk] for chunk in there], PLACES] = asnumpy(array_module(sums).stack(list(there.values())))
        self.context.control.allreduce(table.reshape(-1), name="evaluation")
        loss, count, correct, labels, unknown = (math.fsum(column) for column in table.T)
        if unknown and self.context.control.rank == 0:
            print_warning(f"the outputs of {unknown:,.0f} of {labels:,.0f} validation labels are NaN: none counts as right")
        metrics = {"loss": loss / (count or 1.0)}
        if self.loss.kind == "classes":
            metrics["accuracy"] = correct / max(labels, 1.0)
        if self.measure is not None:
            numbers, self.tables = self.measure.add_up()
            metrics |= numbers
        return metrics

    def _read(self, chunk: int) -> tuple[Any, Any]:
        with self.span("evaluation", f"read chunk {chunk}"):
            return self.read(chunk)

    def _sums(self, output: Tensor, y: Any) -> tuple[Array, float]:
        """((4,) float64: those of the table at PLACES; the number of terms). Nobody waits here for an array of a device."""
        target = self.inference.feed.targets(y)
        with given_to(self.loss, output) as given:
            loss = self.loss(given, target).array
        xp, numbers = array_module(loss), [loss]
        if self.loss.kind == "classes":
            found = self.context.classes(output.array)
            ignored = getattr(self.loss, "ignore_index", None)
            counts = target == target if ignored is None else target != ignored
            numbers += [((found == target) & (found >= 0) & counts).sum(), counts.sum(), ((found < 0) & counts).sum()]
        sums = xp.zeros(len(PLACES), "float64")
        for i, number in enumerate(numbers):
            sums[i] = number
        return sums, terms(self.loss, self.inference.feed.part(y))


def named_tables(tables: Mapping[str, Any], inputs: Inputs) -> dict[str, Any]:
    """Metrics that are tables, with the names of the classes that the data have beside them."""
    source = inputs.training if inputs.validation is None else inputs.validation
    names = getattr(source, "classes", None)
    return {**tables, **({"classes": list(names)} if tables and names else {})}
