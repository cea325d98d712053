"""Forward and backward of many rows at once, with the gradient of each clipped by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import Array
from mpitrain.data import MicroBatch
from mpitrain.nn.loss import terms
from mpitrain.parallel.pipeline.runner import Pipeline
from mpitrain.privacy.ghost import scale_rows, squared_norms
from mpitrain.privacy.mechanism import Mechanism


class ByNorms(Pipeline):
    """The gradient of a micro-batch is the sum of those of its rows' mean losses, each clipped: norms come from one backward
    (`privacy.ghost`), and are made 1e-5 larger, more than float32 can have lost of them."""

    mechanism: Mechanism                                      # set before the first run
    _inside = False                                           # whether a backward runs

    def differentiate(self, output: Tensor, grad: Array, micro: MicroBatch) -> None:
        deferred = run_backward(output, grad, progress=self.reducer.progress, split=True)
        assert deferred is not None
        of_each = np.array([terms(self.loss, self.feed.part(micro.y[i:i + 1])) or 1.0 for i in range(len(micro.x))])
        norms = np.sqrt(squared_norms(deferred.nodes, len(micro.x))) * (1 + 1e-5) / of_each
        scale_rows(deferred.nodes, np.array([self.mechanism.factor(norm * norm) for norm in norms]) / of_each)
        deferred.run()

    def _backward(self, action: Any, *, begun: bool = False) -> None:
        self._inside = True
        super()._backward(action, begun=begun)
        self._inside = False

    def _total(self) -> float:
        return 1.0 if self._inside else super()._total()

    def run(self, micro_batches: Sequence[MicroBatch], **options: Any) -> Any:
        self._inside = False                                  # a backward may have failed
        return super().run(micro_batches, **options)
