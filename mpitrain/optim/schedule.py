"""Learning rates as functions of the step: no state, so a resumed run continues where it was.

Steps count from 0: update number k+1 uses ``rate(k)``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from mpitrain.arguments import misfit
from mpitrain.errors import ConfigError, GraphError
from mpitrain.registry import Registry, named

Rate: TypeAlias = Callable[[int], float]
SCHEDULES: Registry[Callable[..., Rate]] = Registry("schedule")
"""Each is called with lr, min_lr, warmup_steps, total_steps and its own keywords, and gives the rate from warm-up on."""


class Adaptive:
    """A rate that follows the evaluations of a run: it has a state, which checkpoints keep. `rate(step)` as any other's."""

    def __call__(self, step: int) -> float:
        raise GraphError(f"{type(self).__name__} defines no rate")

    def observe(self, loss: float) -> None:
        """The validation loss of an evaluation, the same on all ranks."""

    def record(self) -> dict[str, Any]:
        """The state, plain JSON."""
        return {}

    def restore(self, record: dict[str, Any]) -> None:
        """Goes on from a state."""


def schedule(name: str | Callable[..., Rate], *, lr: float, min_lr: float = 0.0, warmup_steps: int = 0, total_steps: int,
             **options: Any) -> Rate:
    """The rate at each step: linear warm-up lr (k+1) / (warmup_steps+1), then the schedule called `name`.

    `name` may be a function like those in SCHEDULES. ConfigError where the numbers make no sense.
    """
    make = SCHEDULES.resolve(name) if isinstance(name, str) else name
    given = {"lr": lr, "min_lr": min_lr, "warmup_steps": warmup_steps, "total_steps": total_steps}
    wrong = misfit(schedule, given, "optimizer.") or misfit(make, {**given, **options}, "optimizer.")
    if wrong:
        raise ConfigError(wrong)
    if not 0.0 <= lr < math.inf:
        raise ConfigError(f"optimizer.lr must be a finite number, 0 or more, found {lr}")
    if not 0.0 <= min_lr <= lr:
        raise ConfigError(f"optimizer.min_lr must lie between 0 and lr = {lr}, not {min_lr}")
    if warmup_steps < 0:
        raise ConfigError(f"optimizer.warmup_steps must be 0 or more, not {warmup_steps}")
    if not 0.0 <= options.get("gamma", 0.0) < math.inf:
        raise ConfigError(f"optimizer.gamma must be a finite number, 0 or more, found {options['gamma']}")
    after = make(**given, **options)
    if not callable(after):
        raise ConfigError(f"optimizer.schedule must give a function of the step, and {named(make)} gives {named(after)}")
    if make is one_cycle or isinstance(after, Adaptive):      # One-cycle has a rise of its own, and what adapts knows its own.
        return after

    def rate(step: int) -> float:
        return lr * (step + 1) / (warmup_steps + 1) if step < warmup_steps else after(step)
    return rate


@SCHEDULES.register("constant")
def constant(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> Rate:
    """lr, always."""
    return lambda step: lr


@SCHEDULES.register("step")
def step(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int, milestones: Sequence[int] | None = None,
         gamma: float = 0.1, step_size: int = 0) -> Rate:
    """lr times `gamma` for each milestone passed, at least min_lr; by default at half and three quarters of the run.

    With `step_size` it falls each time so many steps have passed.
    """
    if step_size < 0:
        raise ConfigError(f"optimizer.step_size must be a number of steps, 0 or more, found {step_size}")
    if step_size:
        return lambda step: max(min_lr, lr * gamma ** (step // step_size))
    at = sorted(milestones) if milestones is not None else [total_steps // 2, total_steps * 3 // 4]
    return lambda step: max(min_lr, lr * gamma ** bisect_right(at, step))


@SCHEDULES.register("linear")
def linear(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> Rate:
    """A straight line from lr to min_lr, reached at total_steps."""
    def rate(step: int) -> float:
        done = _done(step, warmup_steps, total_steps)
        return (1.0 - done) * lr + done * min_lr
    return rate


@SCHEDULES.register("cosine")
def cosine(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> Rate:
    """Half a cosine from lr to min_lr, reached at total_steps (Loshchilov and Hutter 2017)."""
    def rate(step: int) -> float:
        if step > total_steps:
            return min_lr
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * _done(step, warmup_steps, total_steps))) * (lr - min_lr)
    return rate


@SCHEDULES.register("one_cycle")
def one_cycle(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> Rate:
    """Up from lr/25 and down to min_lr, both along cosines (Smith and Topin 2018).

    The peak is at step warmup_steps - 1 (without warm-up: three tenths of the run), the end at the run's last step.
    """
    peak = (float(warmup_steps) or 0.3 * total_steps) - 1.0

    def rate(step: int) -> float:
        if step <= peak:
            return _along_cosine(lr / 25.0, lr, step / peak if peak > 0 else 1.0)
        return _along_cosine(lr, min_lr, min(1.0, (step - peak) / (total_steps - 1 - peak)) if total_steps - 1 > peak else 1.0)
    return rate


def _done(step: int, warmup_steps: int, total_steps: int) -> float:
    """How much of the way from the end of warm-up to the end of the run lies behind, 0 to 1."""
    return min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))


def _along_cosine(start: float, end: float, done: float) -> float:
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * done))


for _name in ("exponential", "polynomial", "warm_restarts", "cyclic", "inverse_square_root", "sequential", "chained", "plateau"):
    SCHEDULES.register_later(_name, f"mpitrain.optim.schedules:{_name}")
