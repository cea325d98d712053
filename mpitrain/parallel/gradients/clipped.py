"""Gradients of single rows, or of whatever a micro-batch is, each clipped before it is added to others."""

from __future__ import annotations

from typing import Any

from mpitrain.optim.norm import sum_of_squares
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.placement.buckets import Turn
from mpitrain.privacy.mechanism import Mechanism


class ClippedReducer(GradientReducer):
    """A gradient's norm is known when its backward is over, so no bucket leaves before: nothing is hidden behind backward."""

    def __init__(self, *arguments: Any, mechanism: Mechanism, **options: Any):
        self.mechanism = mechanism
        super().__init__(*arguments, **options)

    def begin_micro_batch(self, index: int | None = None, *, last: bool, chunk: int = 0) -> None:
        super().begin_micro_batch(index, last=False, chunk=chunk)

    def _settle(self, turn: Turn) -> None:
        if turn.leaf >= 0:
            self._clip(turn)
        super()._settle(turn)

    def _clip(self, turn: Turn) -> None:
        arena = self._arenas[turn.arena]
        own = [arena[s.start:s.stop] for bucket in turn.buckets for s in bucket.segments if s.parameter.grad is not None]
        factor = self.mechanism.factor(sum(sum_of_squares(part) for part in own))
        for part in own if factor != 1.0 else ():
            part *= part.dtype.type(factor)
