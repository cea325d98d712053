"""The intervals of a run (logging, evaluation, checkpoints), and the results of one step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import ConfigError

NO_TALLY = np.zeros(0)


class Step(NamedTuple):
    """One completed update; `loss` is the mean over the global batch, before the update. On a device it is still on its way there
    (`pipeline.late.LateLosses`), and who asks for it waits for the step.

    `comm_exposed_s` is the wait of the rank that waited least: the others waited for slower ranks too, not for messages alone.
    `tally` sums all mixtures of experts, if there are any: see `nn.MixtureOfExperts.take_tally`. `skipped` is the number of steps
    so far that were left out because they were not finite, perhaps this one. `worked` (n,) and `loaded` (n,) are seconds of each
    of n ranks, valid until the next step: at work rather than waiting for other ranks, and of these waiting for data; empty on
    one rank.
    """

    mean: Any
    lr: float
    grad_norm: float | None
    comm_exposed_s: float
    tally: np.ndarray[Any, Any] = NO_TALLY
    skipped: int = 0
    worked: np.ndarray[Any, Any] = NO_TALLY
    loaded: np.ndarray[Any, Any] = NO_TALLY

    @property
    def loss(self) -> float:
        return float(self.mean)


class Pauses:
    """The `steps` after which a run saves a checkpoint and then asks whether it goes on: `goes_on(step, metrics)` answers alike
    on all ranks. It is asked at once where a run is resumed at such a step."""

    def __init__(self, steps: Collection[int] = (),
                 goes_on: Callable[[int, dict[str, float]], bool] = lambda step, metrics: True):
        self.steps, self.goes_on, self.paused = steps, goes_on, False

    def ask(self, step: int, metrics: dict[str, float]) -> None:
        """After a step whose state is saved, where it is one of those."""
        if step in self.steps:
            self.paused = not self.goes_on(step, metrics)


@dataclass
class Plan:
    """Intervals in steps, 0 for never; steps count from 1, and every action comes at the end of its step."""

    steps: int
    steps_per_epoch: int
    batch_size: int
    eval_every: int
    checkpoint_every: int
    keep_best: bool
    log_every: int

    def logs(self, step: int) -> bool:
        """Whether a line is written about this step; the norm of its gradient is computed then."""
        return self._is_due(self.log_every, step)

    def evaluates(self, step: int) -> bool:
        return self._is_due(self.eval_every, step)

    def saves(self, step: int) -> bool:
        """Whether a checkpoint is due after this step regardless of an evaluation."""
        return self._is_due(self.checkpoint_every, step)

    def epoch(self, step: int) -> int:
        return (step - 1) // self.steps_per_epoch

    def _is_due(self, every: int, step: int) -> bool:
        return step == self.steps or (bool(every) and step % every == 0)


def evaluated_where(pauses: Pauses, plan: Plan) -> Pauses:
    """The same pauses. ConfigError for a step that no evaluation follows, of whose metrics nobody would know."""
    for step in pauses.steps:
        if not plan.evaluates(step):
            raise ConfigError(f"the run may pause after step {step}, and train.eval_every = {plan.eval_every} evaluates at other "
                              "steps; leave train.eval_every out, which evaluates after each epoch")
    return pauses
