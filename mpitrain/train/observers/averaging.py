"""Averages of weights, [average] of a run: an exponential one (EMA; Polyak and Juditsky, 1992), or equal weights of several steps
(SWA; Izmailov et al., 2018).

    ema    mean += (1 - d) (weights - mean)       d = min(decay, (1 + t) / (10 + t)) at the t-th update, where it warms up
    swa    mean += (weights - mean) / (t + 1)

The weights that train know nothing of it. The mean lies as the optimizer's state does: whole, or in this rank's slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpitrain.checkpoint.kinds import Kept, Placed, Values
from mpitrain.checkpoint.state import State
from mpitrain.config import Config
from mpitrain.config.sections import AverageConfig
from mpitrain.parallel.policies.policy import Policy
from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer

KIND = "average"                                  # the prefix of the means in a checkpoint
WARM_UP = 10


def refuse_average(config: Config, steps: int) -> None:
    """ConfigError for an [average] that begins after the run, or before all weights go back to those of a step."""
    start, rewind = config.average.start, config.shrink.rewind
    if max(start, config.average.every) > steps:
        raise config.wrong(f"[average] begins with step {max(start, config.average.every)}, and the run has {steps} steps; set "
                           f"average.start and average.every to {steps} at most", ("average.start", "average.every"))
    if config.shrink.prune and not isinstance(rewind, str) and start < config.shrink.end:
        raise config.wrong(f"average.start = {start} begins before step {config.shrink.end}, when all weights go back to those "
                           f"of step {rewind} (shrink.rewind): a mean of both is of no training; set average.start to "
                           f"{config.shrink.end}", ("average.start", "shrink.rewind"))


class Averaging(Observer):
    """The mean of a run's weights, in its state as ``average/NAME``, and the number of weights in it."""

    def __init__(self, config: AverageConfig, policy: Policy, state: State):
        self.config, self.policy, self.state = config, policy, state
        self.models = 0                                       # weights that the mean is of
        self.mean = policy.storage.new_flat()
        self.copied_bytes = self.mean.nbytes
        self.sliced = policy.shards is not None
        self._bits: Any = None                                # of the masks that the mean has obeyed last
        self.kind = Kept(KIND, self._placed, policy.storage.dtype)
        state.kept += [self.kind, Values(f"{KIND}d", lambda: {"models": np.array(self.models)}, self._take)]

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self._obey_masks()
        due = step >= self.config.start and (step - self.config.start) % self.config.every == 0
        if not due or self.policy.blamed:                     # A step that was left out has changed nothing.
            return
        factor = self._factor()
        for s in self.policy.storage.segments:
            mean, values = self.mean[s.start:s.stop], self.policy.storage.values[s.start:s.stop]
            if factor == 1.0:
                mean[...] = values
            else:
                mean += mean.dtype.type(factor) * (values[...] - mean)
        self.models += 1

    def _obey_masks(self) -> None:
        """Zeros in the mean where the weights were pruned now. They stay while these masks do, as those of the weights."""
        masks = self.policy.masks
        if masks is not None and masks.bits is not self._bits:
            masks.clear((s, self.mean[s.start:s.stop]) for s in self.policy.storage.segments)
            self._bits = masks.bits

    def _factor(self) -> float:
        """The share of the next weights in the mean."""
        t = self.models
        if self.config.kind == "swa" or t == 0:
            return 1.0 / (t + 1)
        decay = self.config.decay
        return 1.0 - (min(decay, (1 + t) / (WARM_UP + t)) if self.config.warmup else decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model computes with the mean inside, and with its weights, to the bit, afterwards. It communicates."""
        if not self.models or not self.config.evaluate:
            yield
            return
        self._exchange()
        yield                                                 # An error inside ends the run.
        self._exchange()

    def _exchange(self) -> None:
        policy = self.policy
        policy.settle()                                       # Nobody writes before all have read.
        for s in policy.own():
            values = policy.storage.values[s.start:s.stop]
            before = np.array(values) if isinstance(values, np.ndarray) else values.copy()
            values[...] = self.mean[s.start:s.stop]
            self.mean[s.start:s.stop] = before
        policy.publish()

    def finish(self, step: int) -> Mapping[str, Any]:
        return {"average": {"models": self.models, "parameters_sha256": self.state.sha256(self.kind)}}

    def _placed(self) -> Iterable[Placed]:
        storage = self.policy.storage
        return (Placed(s.parameter, view, s.first if self.sliced else None)
                for s, view in zip(storage.segments, storage.views(self.mean)))

    def _take(self, found: Mapping[str, Any]) -> None:
        self.models = int(found["models"])
