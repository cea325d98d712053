"""What the mixtures of experts of a stage have counted in a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.nn import mixtures
from mpitrain.placement.stages import Stage


class Tallies:
    """The sums of the tallies of a stage's mixtures (`nn.MixtureOfExperts.take_tally`); empty for models without experts."""

    def __init__(self, stage: Stage):
        self._model_has_some, self._layers = bool(mixtures(stage.whole)), [layer for _, layer in mixtures(stage.model)]
        self._kept: np.ndarray[Any, Any] | None = None

    def take(self) -> np.ndarray[Any, Any]:
        """The sum since the last call; where one was kept, that one."""
        if not self._model_has_some:
            return np.zeros(0)
        found: np.ndarray[Any, Any] = sum((layer.take_tally() for layer in self._layers), np.zeros(4))
        kept, self._kept = self._kept, None
        return found if kept is None else kept

    def told(self, tally: np.ndarray[Any, Any], norm: float | None) -> dict[str, float]:
        """What metrics say of a step: `tally` over all ranks, and the `norm` of its gradient where it is known."""
        return {"balance": tally[0] / tally[1], "dropped": tally[2] / tally[3]} if len(tally) and tally[1] else {}

    def keep(self) -> np.ndarray[Any, Any]:
        """The sum since the last call, which `take` returns next, whatever runs until then."""
        self._kept = self.take()
        return self._kept
