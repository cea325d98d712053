"""What a policy asks the level above it where there is none: see `levels.level.Level`."""

from __future__ import annotations

from typing import Any


class Alone:
    """No other site to meet."""

    needs_gradients = False
    rate_factor = 1.0
    nbytes = 0

    def begin(self, step: int) -> None:
        """Nothing is sent."""

    def mix(self, gradients: Any) -> bool:
        """The gradients stay as they are, and update."""
        return True

    def end(self, step: int, lr: float) -> None:
        """Nobody is met."""
