"""Gives the tuning of the first steps its times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.parallel.gradients.tuning import Tuning
from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer


class Tune(Observer):
    """Gives `tuning` the times of steps; its choices go into run.json."""

    def __init__(self, tuning: Tuning):
        self.tuning = tuning

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self.tuning.after_step(seconds)

    def finish(self, step: int) -> Mapping[str, Any]:
        return {"choices": self.tuning.choices}
