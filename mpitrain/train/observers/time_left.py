"""A run stops by itself while there is time to save: before `train.stop_before`, or the end of its Slurm job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime

from mpitrain.comm.job.signals import StopRequest
from mpitrain.errors import ConfigError
from mpitrain.train.observers.observer import Observer, Watched

SAVES, LOOKS, MARGIN = 3, 2, 10.0        # needed: so many times the last save and the longest step, and so many seconds


def end_of_time(stop_before: str, environment: Mapping[str, str] = os.environ) -> float | None:
    """The moment (seconds since 1970) at which the run must have ended; None for any. ConfigError for one that has passed."""
    if stop_before == "never":
        return None
    if not stop_before:
        slurms = environment.get("SLURM_JOB_END_TIME", "")
        return float(slurms) if slurms.isdigit() else None
    end = datetime.fromisoformat(stop_before).timestamp()
    if end <= time.time():
        raise ConfigError(f'train.stop_before = "{stop_before}" has passed: set a later time, or "never"')
    return end


class TimeLeft(Observer):
    """Asks for a stop, as SIGUSR1 does, when the time until `end` is needed for the present step and for saving.

    One rank's is enough: the ranks add up what they ask for. `save_s()` gives the seconds that the last save took. The system's
    clock is read once, so that a change of it later changes nothing.
    """

    def __init__(self, end: float, stop: StopRequest, save_s: Callable[[], float], clock: Callable[[], float] = time.monotonic,
                 now: Callable[[], float] = time.time):
        self.stop, self.save_s, self.clock = stop, save_s, clock
        self.end, self.words = clock() + end - now(), datetime.fromtimestamp(end).astimezone().isoformat(" ", "seconds")

    def begin(self, run: Watched) -> None:
        self.tell, self.looked, self.longest = run.tell, self.clock(), 0.0

    def before_step(self, step: int) -> None:
        now = self.clock()
        self.longest = max(self.longest, now - self.looked)   # evaluation and waiting for a save are part of it
        self.looked = now
        needed = SAVES * self.save_s() + LOOKS * self.longest + MARGIN
        if self.end - now < needed and not self.stop.asked:
            self.stop.asked = True
            self.tell(f"step {step}  the time of this job ends at {self.words}, in {max(self.end - now, 0):.0f} s, and up to "
                      f"{needed:.0f} s are kept for saving: the run stops")
