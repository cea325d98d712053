"""An outer rule as an optimizer: the update of a step that is a round, whose gradient is the workers' mean change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.backend import Array
from mpitrain.optim.elementwise import Elementwise
from mpitrain.optim.outer import OuterRule


class ByRule(Elementwise):
    """Applies `rule` to what a round has summed up; its states are the rule's. A step is a round, and the learning rate that
    comes with it is the workers': the rule has one of its own."""

    prefix = "outer"

    def __init__(self, storage: Any, rule: OuterRule):
        super().__init__(storage, 0.0, state=tuple(rule.states))
        self.outer = rule
        self.started_at(**rule.states)
        self.of_workers: Callable[[], int] = lambda: 0        # bytes of what the workers of rounds have here

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.of_workers()

    def rule(self, w: Array, g: Array, *state: Array, decay: float, lr: float, step: int) -> None:
        self.outer.change(w, g, state, round=step, inner_lr=lr)

    @property
    def title(self) -> str:
        return type(self.outer).__name__
