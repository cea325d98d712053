"""Tells this rank's pulse which step and phase it is in, so that a watcher sees who stands still."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.comm.watch.pulse import Pulse
from mpitrain.parallel.gradients.timeline import Timeline
from mpitrain.train.observers.observer import Observer, Watched


class Beats(Observer):
    """Phases come from the spans of `timeline`."""

    def __init__(self, pulse: Pulse, timeline: Timeline):
        self.pulse, self.timeline = pulse, timeline

    def begin(self, run: Watched) -> None:
        self.timeline.heard = self.pulse.heard
        self.pulse.step(run.step)

    def before_step(self, step: int) -> None:
        self.pulse.step(step)

    def finish(self, step: int) -> Mapping[str, Any]:
        self.pulse.finish()
        return {}
