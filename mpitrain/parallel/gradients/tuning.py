"""Choices made by measurement in the first steps of a run: where buckets are cut, and who moves messages.

    steps   0 1 2 | 3 .. 7                     | 8 9 10 | 11 12 13 ..  22
            warm  | ready times of parameters  | warm   | poll thread poll .. thread
                                               ^ cut                         ^ keep the faster one

Rank 0 chooses, all follow, and `choices` holds the result for run.json and the checkpoints. Where buckets are cut can change the
order in which an algorithm adds, hence bits; who moves messages cannot.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.messages.progress import ProgressThread
from mpitrain.errors import CheckpointError
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.placement.buckets import Bucket

WARM_STEPS = 3
READY_STEPS = 5
PAIRS = 6                    # Each policy gets so many steps.
GAIN = 0.98                  # A thread must be so much faster than polling, since it takes time from other processes as well.
PROBE_BYTES = (16 << 10, 256 << 10, 4 << 20)
PROBES = 5                   # Each size is probed so often; the fastest counts.


def choose_bounds(ready_s: Sequence[float], nbytes: Sequence[int], alpha: float, beta: float) -> list[int]:
    """The bounds of as few buckets as possible that let the last bucket land as early as possible.

    Gradient i (in the order of backward) is final at `ready_s[i]` and `nbytes[i]` long. Buckets go one after the other, a bucket
    of B bytes for alpha + beta B seconds, from the moment its last gradient is final. Bounds as in `buckets.cut_buckets`. With
    E(j) the earliest end of an exchange of the first j gradients,

        E(j) = min over i < j of  max(E(i), R(j)) + alpha + beta (S(j) - S(i)),     R, S: running maximum and sum

    (an earlier end of the first part never hurts). The merging rule of MG-WFBP (Shi, Chu, Li, 2019) is greedy for the same model.
    """
    m = len(ready_s)
    ready = np.maximum.accumulate(np.asarray(ready_s, np.float64))
    total = np.concatenate(([0.0], np.cumsum(np.asarray(nbytes, np.float64))))
    if not m:
        return []
    cost = np.where(np.tri(m + 1, k=-1, dtype=bool).T, alpha + beta * (total[None, :] - total[:, None]), np.inf)    # [i, j]
    arrival = np.concatenate((ready[:1], ready))            # [j]; j = 0 is never reached
    best = np.full(m + 1, -np.inf)                          # E; nothing to send is done at any time
    for j in range(1, m + 1):
        best[j] = np.min(np.maximum(best[:j], arrival[j]) + cost[:j, j])
    # The same with exactly k buckets, none of them empty, for the smallest k that is as good.
    ends: NDArray[np.float64] = np.where(np.arange(m + 1) == 0, -np.inf, np.inf)
    came_from: list[NDArray[np.intp]] = []
    while ends[m] > best[m] and len(came_from) < m:
        table = np.maximum(ends[:, None], arrival[None, :]) + cost
        came_from.append(table.argmin(axis=0))
        ends = np.where(np.arange(m + 1) == 0, np.inf, table.min(axis=0))
    bounds, j = [], m
    for source in reversed(came_from):
        bounds.append(j)
        j = int(source[j])
    return bounds[::-1]


def fit_line(nbytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(alpha, beta), neither negative, with alpha + beta bytes nearest to the times, relative to each (least squares)."""
    from mpitrain.schedules.fit import non_negative
    sizes = np.asarray(nbytes, np.float64)
    alpha, beta = non_negative(np.stack([np.ones(len(sizes)), sizes], axis=1), np.asarray(seconds, np.float64))
    return alpha, beta


class Tuning:
    """Makes the measured choices on all ranks at the same step; call `after_step` after each step.

    `thread` is None where polling was asked for, `progress` is "poll", "thread" or "auto".
    """

    def __init__(self, reducer: GradientReducer, channel: Channel, *, progress: str = "poll",
                 thread: ProgressThread | None = None, buckets: bool = False):
        self.reducer, self.channel, self.thread = reducer, channel, thread
        self.choices: dict[str, Any] = {}
        several = reducer.bucket_sum.size > 1
        self._cut, self._race = buckets and several, progress == "auto" and thread is not None and several
        self._step = 0                                          # Steps since the start, or since buckets were cut.
        self._ready: list[dict[str, float]] = []
        self._seconds: tuple[list[float], list[float]] = ([], [])      # Steps polled, and steps moved by the thread.
        reducer.mover = thread if progress == "thread" else None
        self._watch()

    def restore(self, choices: dict[str, Any]) -> None:
        """Takes over what a checkpoint's run had chosen, as far as this run leaves it open and has as many ranks."""
        cut, race = choices.get("buckets"), choices.get("progress")
        if self._cut and cut and cut["ranks"] == self.reducer.bucket_sum.size:
            if not cut["bounds"] or cut["bounds"][-1] != len(self.reducer.storage.segments):
                raise CheckpointError(f"the checkpoint cuts {cut['bounds'][-1:]} parameters into buckets, the model has "
                                      f"{len(self.reducer.storage.segments)}; start a new run")
            self._take_bounds(cut)
        if self._race and race and race["ranks"] == self.reducer.bucket_sum.size:
            self._take_policy(race)
        self._watch()                                       # With nothing left open, no step looks again.

    def after_step(self, seconds: float) -> None:
        """Takes the time of a complete step. Now and then this communicates."""
        if not (self._cut or self._race):
            return
        self._step += 1
        if self._cut:
            self._collect_ready()
        else:
            self._collect_seconds(seconds)
        self._watch()

    def _watch(self) -> None:
        self.reducer.timeline.parameters = {} if self._cut else None

    def _collect_ready(self) -> None:
        if self._step > WARM_STEPS and self.reducer.timeline.parameters:
            self._ready.append(self.reducer.timeline.parameters)
        if self._step == WARM_STEPS + READY_STEPS:
            alpha, beta = self._probe()
            mine = self._bounds(alpha, beta) if self.channel.rank == 0 else None
            self._take_bounds(self.channel.broadcast_object(
                {"bounds": mine, "ranks": self.reducer.bucket_sum.size, "alpha_s": alpha, "beta_s_per_byte": beta}))

    def _bounds(self, alpha: float, beta: float) -> list[int]:
        storage = self.reducer.storage
        backwards = storage.segments[::-1]
        since = [{name: at - min(step.values()) for name, at in step.items()} for step in self._ready]
        late = max((max(step.values()) for step in since), default=0.0)        # Unused parameters count as the last.
        ready = [float(np.median([step.get(s.name, late) for step in since] or [0.0])) for s in backwards]
        starts = [s.start for s in backwards[:-1]] + [0]
        sizes = -np.diff([storage.size, *starts]) * storage.dtype.itemsize
        return choose_bounds(ready, sizes.tolist(), alpha, beta)

    def _probe(self) -> tuple[float, float]:
        """Latency and seconds per byte of the exchange that a step does, in the memory that it is used on."""
        gradients = self.reducer.gradients                  # Nobody uses them between two steps.
        addends = len(self.reducer.tree.nodes) if self.reducer.tree else 1
        gradients[...] = 0
        sizes, times = [], []
        for size in sorted({min(size // gradients.itemsize, gradients.size) for size in PROBE_BYTES}):
            found, probe = [], Bucket(-1, 0, size, self.reducer.storage.segments)
            probe.name = f"probe of {size}"
            collective = self.reducer.bucket_sum.prepare(probe, [gradients[:size]] * addends)
            for _ in range(PROBES):
                began = time.perf_counter()
                if collective is not None:
                    collective.start().wait()
                found.append(time.perf_counter() - began)
            sizes.append(size * gradients.itemsize)
            times.append(min(found))
        return fit_line(sizes, times)

    def _take_bounds(self, cut: dict[str, Any]) -> None:
        self.reducer.cut(cut["bounds"])
        self.choices["buckets"] = cut
        self._cut, self._step = False, 0

    def _collect_seconds(self, seconds: float) -> None:
        """The step just done was polled where its number is odd from the end of the warm-up on."""
        n = self._step - WARM_STEPS
        if n > 0:
            self._seconds[(n - 1) % 2].append(seconds)
        if n == 2 * PAIRS:
            poll, thread = (float(np.median(seconds)) for seconds in self._seconds)
            self._take_policy(self.channel.broadcast_object({
                "choice": "thread" if thread < GAIN * poll else "poll", "ranks": self.reducer.bucket_sum.size,
                "poll_step_s": poll, "thread_step_s": thread}))
            return
        self.reducer.mover = self.thread if n >= 0 and n % 2 else None

    def _take_policy(self, race: dict[str, Any]) -> None:
        self.choices["progress"] = race
        self._race = False
        self.reducer.mover = self.thread if race["choice"] == "thread" else None
