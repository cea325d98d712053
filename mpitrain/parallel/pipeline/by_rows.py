"""Forward and backward of one row after another, whose gradients are each row's own."""

from __future__ import annotations

from mpitrain.nn.loss import terms
from mpitrain.parallel.pipeline.runner import Pipeline
from mpitrain.schedules.pipeline import Action


class RowByRow(Pipeline):
    """Each micro-batch is a row. Its gradient is that of the row's mean loss, divided by nothing: how many rows were drawn must
    not show in it."""

    _terms = 0.0                                              # of the loss of the row whose backward runs

    def _backward(self, action: Action, *, begun: bool = False) -> None:
        self._terms = terms(self.loss, self.feed.part(self._micro[action.micro].y))
        super()._backward(action, begun=begun)
        self._terms = 0.0

    def _total(self) -> float:
        return super()._total() if not self._terms else self._terms
