"""Says when the ranks wait for one that takes longer than they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer, Watched

SHARE = 0.2                # of a step that the median of the other ranks waits, from which on it is said
EVERY = 100                # steps between two lines, at least; and no line is about fewer than FEWEST
FEWEST = 20


class Stragglers(Observer):
    """Adds up the ranks' seconds of work; a line is due with those of the log. `hosts` are those of the ranks, in their order."""

    def __init__(self, hosts: Sequence[str]):
        self.hosts = list(hosts)
        self._worked, self._loaded = np.zeros(len(self.hosts)), np.zeros(len(self.hosts))
        self._steps, self._said = 0, -EVERY

    def begin(self, run: Watched) -> None:
        self.plan, self.tell = run.plan, run.tell

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self._worked += fields.worked
        self._loaded += fields.loaded
        self._steps += 1
        if self.plan.logs(step) and self._steps >= FEWEST and step - self._said >= EVERY:
            if (said := straggler(self._worked, self._loaded, self.hosts)) is not None:
                self.tell(said)
                self._said = step
            self._worked[:] = self._loaded[:] = self._steps = 0


def straggler(worked: np.ndarray[Any, Any], loaded: np.ndarray[Any, Any], hosts: Sequence[str]) -> str | None:
    """A line about the rank that takes longest, if the others wait long for it.

    `worked` are the seconds of each rank, without waiting for other ranks; `loaded` of these it waited for data.
    """
    slowest = int(worked.argmax())
    usual = float(np.median(np.delete(worked, slowest)))
    late = float(worked[slowest]) - usual
    if usual <= 0 or late < SHARE * worked[slowest]:          # In very short steps waiting may be measured longer than they are.
        return None
    data = float(loaded[slowest] - np.median(np.delete(loaded, slowest)))
    return (f"rank {slowest} ({hosts[slowest]}) takes {worked[slowest] / max(usual, 1e-9):.1f} times as long as the other ranks, "
            f"mostly {'to read its data' if data > late / 2 else 'to compute'}: they wait {late / worked[slowest]:.0%} of a step "
            "for it")
