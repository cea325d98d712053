"""What gathers of parameters that travel as few bits send: numbers in metrics.jsonl."""

from __future__ import annotations

import math

import numpy as np

from mpitrain.comm.messages.channel import Channel
from mpitrain.parallel.policies.policy import Policy
from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer, Watched


class Gathers(Observer):
    """Every rank has one, where parameters travel packed. It communicates in steps that are logged; `control` connects all ranks.

    `gather_bytes` are those that the rank that sent most has posted in a step, `gather_ratio` is what float32 would have been
    over it, and `gather_s` the seconds of encoding and decoding of the slowest rank. Gathers of evaluations count for the next
    step.
    """

    def __init__(self, policy: Policy, control: Channel):
        self.packed, self.control = policy.packed, control
        self._steps, self._before = 0, self._totals()

    def begin(self, run: Watched) -> None:
        self.plan, self.more = run.plan, run.more

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self._steps += 1
        for name in ("gather_bytes", "gather_ratio", "gather_s"):
            self.more.pop(name, None)
        if not self.plan.logs(step):
            return
        table = np.zeros((self.control.size, 3))
        table[self.control.rank] = self._totals() - self._before
        self.control.allreduce(table, name="bytes of gathers")
        sent, dense, coded = table.T / self._steps
        self.more.update(gather_bytes=float(sent.max()), gather_ratio=float(dense.sum() / sent.sum()) if sent.any() else math.nan,
                         gather_s=float(coded.max()))
        self._steps, self._before = 0, self._totals()

    def _totals(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Bytes sent, bytes that float32 would have taken, seconds of coding, since the start."""
        return np.array([self.packed.sent_bytes, self.packed.dense_bytes, self.packed.clock.seconds])
