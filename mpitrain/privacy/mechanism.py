"""The Gaussian mechanism of a run: what one unit adds is bounded, the sum gets noise, and each step is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpitrain.optim.norm import sum_of_squares
from mpitrain.privacy.accountant import Spent
from mpitrain.privacy.noise import Noise


class Mechanism:
    """Units (clients, or rows) are in a step with probability `q` each, which are `expected` on average; what each adds is
    clipped to the norm `clip`, and the sum over them gets noise of `sigma` times that. It is divided by `expected`, never by how
    many were drawn, which would tell who is there.

    With `spent` None epsilon does not hold, and nothing is counted.
    """

    def __init__(self, clip: float, sigma: float, q: float, expected: float, noise: Noise, spent: Spent | None):
        self.clip, self.sigma, self.q, self.expected, self.noise, self.spent = clip, sigma, q, expected, noise, spent
        self.segments: Sequence[Any] = ()                     # of the parameters; what is not trained gets no noise

    def factor(self, squared_norm: float) -> float:
        """What makes the norm `clip` where it is larger, else 1. NaN comes through."""
        if not math.isfinite(squared_norm):
            return math.nan
        norm = math.sqrt(squared_norm)
        return self.clip / norm if norm > self.clip else 1.0

    def bound(self, flat: Any) -> None:
        """Clips a flat array, in place."""
        factor = self.factor(sum_of_squares(flat))
        if factor != 1.0:
            flat *= flat.dtype.type(factor)

    def release(self, total: Any, step: int) -> None:
        """Makes the mean of the sum of clipped units, with noise, in place; counts the step. It communicates."""
        if self.spent is not None:
            self.spent.add(self.q, self.sigma)                # Before anybody can see what it made.
        if self.sigma:
            self.noise.add(total, self.sigma * self.clip, step)
        total /= total.dtype.type(self.expected)
        for segment in self.segments:
            if not segment.parameter.requires_grad:
                total[segment.start:segment.stop] = 0.0

    def told(self) -> dict[str, float]:
        """What lines of metrics say."""
        return {} if self.spent is None else {"epsilon": self.spent.epsilon(), "delta": self.spent.delta}
