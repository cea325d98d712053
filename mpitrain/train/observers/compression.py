"""What compressed gradients save and cost by a run's own figures: numbers in metrics.jsonl, and a line where they do not pay.

Encoding takes the core that would compute, so nothing hides it. It pays exactly where

    encode + decode  <  waiting for dense gradients - waiting for compressed ones

Both sides are measured once, alike: the run's own buckets are summed both ways while nobody computes, and put at the times at
which they had been ready in the steps before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.checkpoint.residuals import Residuals, is_ours
from mpitrain.checkpoint.state import State
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.work import Collective
from mpitrain.parallel.gradients.timeline import StepTimes
from mpitrain.parallel.policies.policy import Policy
from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer, Watched

WARM, LOOKED = 5, 20               # steps after the first one of what is to last: left out of the comparison, and its last one
PROBES = 3                         # sums of a bucket each way, of which the fastest counts
LEAST_S = 20e-6                    # less time is no reason for a line


class Compression(Observer):
    """Every rank has one, where gradients are compressed. It communicates in steps that are logged, and once for the comparison.

    `control` connects all ranks of the run. Adds the residuals to the kinds of `state`.
    """

    def __init__(self, policy: Policy, state: State, control: Channel):
        self.policy, self.state, self.control = policy, state, control
        self.sum: Any = policy.compressed
        self.residuals = Residuals(self.sum, policy.stage.whole, control)
        state.kept.append(self.residuals)
        self.copied_bytes = 0
        self._steps = 0                                       # since the last line
        self._before = self._totals()
        self._compared = 0                                    # compressed steps that the comparison has seen

    def begin(self, run: Watched) -> None:
        self.plan, self.tell, self.more = run.plan, run.tell, run.more

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self._steps += 1
        if self.sum.compares and step > self.sum.settled and self._compared < LOOKED:
            self._compare()
        if self.plan.logs(step):
            self.more.update(self._numbers(fields))
            self._steps, self._before = 0, self._totals()

    def _totals(self) -> np.ndarray[Any, Any]:
        """Bytes sent, of these to other nodes, seconds of coding, and bytes that dense sums would have sent, since the start."""
        meter = self.sum.meter
        return np.array([meter.sent, meter.abroad, self.sum.clock.seconds, self.sum.dense_sent])

    def _numbers(self, fields: Step) -> dict[str, float]:
        """The fields of a line: means of the steps since the last one. It communicates."""
        n, rank = self.control.size, self.control.rank
        table = np.zeros((n, 5))
        table[rank] = [*(self._totals() - self._before), self._squares()]
        self.control.allreduce(table, name="bytes of the exchange")
        sent, abroad, coded, dense = table[:, :4].T / self._steps
        most, slowest = int(sent.argmax()), float(coded.max())
        saved, norm = float(dense[most] - sent[most]), fields.grad_norm
        owed = math.sqrt(float(table[:, 4].sum()))
        return {"wire_bytes": float(sent[most]), "wire_bytes_nodes": float(abroad.max()),
                "compress_ratio": float(dense.sum() / sent.sum()) if sent.any() else math.nan, "compress_s": slowest,
                "error_norm": owed / norm if norm else math.nan,
                "break_even_mbit": 8e-6 * saved / slowest if slowest else math.nan}

    def _squares(self) -> float:
        """The sum of squares of the residuals of this rank, without those that another one has as well."""
        mesh = self.state.mesh
        return math.fsum(float(np.dot(held.array, held.array)) for name, of in self.sum.owners.items() if of == "worker"
                         for held in self.sum.held(name) if is_ours(held.leaf, mesh))

    def _compare(self) -> None:
        """After the last step of the comparison, a line where dense sums would be faster. It communicates then."""
        self._compared += 1
        if self._compared < LOOKED:
            return
        steps = list(self.policy.reducer.timeline.steps)[-(LOOKED - WARM):]
        dense, coded, coding = self._probe()
        mine = [sum(coding), waited(steps, dense) - waited(steps, coded)]
        encoding, saved = np.mean(self.control.gather_objects(mine), axis=0)
        if encoding > saved + LEAST_S:
            self.tell(f"dense would be faster on this link: {encoding * 1e3:.1f} ms of encoding save {max(saved, 0.0) * 1e3:.1f} "
                      'ms of waiting in a step; set comm.compress = ""')

    def _probe(self) -> tuple[list[float], list[float], list[float]]:
        """For each bucket the seconds of a dense sum, of a compressed one without its coding, and of coding. It communicates."""
        reducer, before, kept = self.policy.reducer, self._totals(), self.sum.copied_state()
        gradients: Array = reducer.gradients                  # nobody uses them between two steps
        dense, coded, coding = list[float](), list[float](), list[float]()
        for bucket in reducer.buckets:
            array = gradients[bucket.start:bucket.stop]
            plain, _ = self._fastest(self.sum.dense(bucket, [array])) if bucket.trained else (0.0, 0.0)
            messages, own = self._fastest(self.sum.prepare(bucket, [array])) if bucket.trained else (0.0, 0.0)
            dense.append(plain)
            coded.append(messages)
            coding.append(own)
        self.sum.restore_state(kept)
        self._before += self._totals() - before               # no step's
        return dense, coded, coding

    def _fastest(self, collective: Collective) -> tuple[float, float]:
        """Seconds of the fastest of several, without coding, and of its coding."""
        took = []
        for _ in range(PROBES):
            self.sum.channel.messages.barrier()               # of those that have the same buckets
            began, before = perf_counter(), self.sum.clock.seconds
            collective.start().wait()
            coding = self.sum.clock.seconds - before
            took.append((perf_counter() - began - coding, coding))
        return min(took, key=sum)


def waited(steps: Sequence[StepTimes], seconds: Sequence[float]) -> float:
    """Seconds after backward, in the median step, at which the last bucket had landed if each took its `seconds`, one after the
    other, from the time on at which it was ready."""
    waits = []
    for step in steps:
        end = 0.0
        for ready, took in zip(step.ready, seconds):
            end = max(end, ready) + took
        waits.append(max(0.0, end - step.backward_end))
    return float(np.median(waits)) if waits else 0.0
