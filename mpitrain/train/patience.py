"""Early stopping, [stop]: a run ends when so many evaluations have found nothing better (Prechelt, 1998)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def is_better(new: float, old: float | None, higher: bool, by: float = 0.0) -> bool:
    """Whether `new` is better than `old` by more than that, or finite and the first. NaN and infinity never are."""
    if not math.isfinite(new):
        return False
    return old is None or (new - old if higher else old - new) > by


class Patience:
    """Ends a run after `patience` evaluations in a row whose `metric` is not better than the best before them by more than
    `min_delta`. Its state goes into checkpoints, so a resumed run ends where the run would have."""

    def __init__(self, metric: str, higher: bool, patience: int, min_delta: float = 0.0):
        self.metric, self.higher, self.patience, self.min_delta = metric, higher, patience, min_delta
        self.best: float | None = None
        self.best_step, self.waited = 0, 0

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of an evaluation."""
        value = metrics[self.metric]
        if is_better(value, self.best, self.higher, self.min_delta):
            self.best, self.best_step, self.waited = float(value), step, 0
        else:
            self.waited += 1

    @property
    def reason(self) -> str:
        """Why the run is over; "" while it is not."""
        if self.waited < self.patience:
            return ""
        found = "none of them was finite" if self.best is None else f"the best, {self.best:.6g}, is that of step {self.best_step}"
        return (f"{self.metric} has not become better by more than {self.min_delta:g} for {self.waited} "
                f"evaluation{'s' * (self.waited > 1)}: {found}")

    def record(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"metric": self.metric, "best": self.best, "best_step": self.best_step, "waited": self.waited}

    def restore(self, kept: Any) -> None:
        """That of a checkpoint. Another metric's, and none, begin anew. ValueError, TypeError or KeyError for what is damaged."""
        if kept is None or kept["metric"] != self.metric:
            return
        self.best = None if kept["best"] is None else float(kept["best"])
        self.best_step, self.waited = int(kept["best_step"]), int(kept["waited"])
