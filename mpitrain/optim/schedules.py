"""Further learning rates; conventions as in `schedule`. Their keys are further keys of [optimizer]."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.arguments import parameters_of
from mpitrain.errors import ConfigError, nearest
from mpitrain.optim.schedule import SCHEDULES, Adaptive, Rate, schedule
from mpitrain.registry import named


def exponential(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int, gamma: float = 0.1) -> Rate:
    """lr gamma^k after k steps, at least min_lr."""
    return lambda step: max(min_lr, lr * gamma ** (step - warmup_steps))


def polynomial(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int, power: float = 1.0) -> Rate:
    """From lr to min_lr, reached at total_steps: the rest of the way to the power `power`."""
    if power <= 0:
        raise ConfigError(f"optimizer.power must be more than 0, found {power}")
    length = max(1, total_steps - warmup_steps)
    return lambda step: min_lr + (lr - min_lr) * max(0.0, 1.0 - (step - warmup_steps) / length) ** power


def inverse_square_root(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> Rate:
    """lr sqrt((warmup_steps + 1) / (k + 1)), at least min_lr (Vaswani et al., 2017)."""
    return lambda step: max(min_lr, lr * math.sqrt((warmup_steps + 1) / (step + 1)))


def warm_restarts(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int, t_0: int = 0, t_mult: int = 1) -> Rate:
    """Cosines from lr to min_lr, the first over `t_0` steps (default: a tenth of the run), each of the others `t_mult` times as
    long as the one before (Loshchilov and Hutter, 2017)."""
    if t_0 < 0 or t_mult < 1:
        raise ConfigError(f"optimizer.t_0 must be 1 or more, or not given, and t_mult 1 or more, found {t_0} and {t_mult}")
    first = t_0 or max(1, (total_steps - warmup_steps) // 10)

    def rate(step: int) -> float:
        at, length = step - warmup_steps, first
        if t_mult == 1:
            at %= length
        while at >= length:
            at, length = at - length, length * t_mult
        return min_lr + (lr - min_lr) * (1.0 + math.cos(math.pi * at / length)) / 2.0
    return rate


def cyclic(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int, step_size_up: int = 2000, step_size_down: int = 0,
           mode: str = "triangular", gamma: float = 1.0) -> Rate:
    """Up from min_lr to lr in `step_size_up` steps and down again in `step_size_down` (default: as many) (Smith, 2017).

    `mode` "triangular2" halves the height after each cycle, "exp_range" multiplies it with gamma^k.
    """
    if step_size_up < 1 or step_size_down < 0:
        raise ConfigError(f"optimizer.step_size_up must be 1 or more, and step_size_down 0 or more, found {step_size_up} and "
                          f"{step_size_down}")
    if mode not in ("triangular", "triangular2", "exp_range"):
        raise ConfigError(f'optimizer.mode = "{mode}" is not there{nearest(mode, ("triangular", "triangular2", "exp_range"))}')
    whole = step_size_up + (step_size_down or step_size_up)

    def rate(step: int) -> float:
        k = step - warmup_steps
        cycle, at = divmod(k, whole)
        height = at / step_size_up if at <= step_size_up else (whole - at) / (whole - step_size_up)
        factor = {"triangular": 1.0, "triangular2": 0.5 ** cycle}.get(mode)
        return min_lr + (lr - min_lr) * height * (gamma ** k if factor is None else factor)
    return rate


def sequential(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int, milestones: Sequence[int] | None = None,
               schedules: Sequence[Mapping[str, Any]] = ()) -> Rate:
    """One schedule after another: `schedules` are tables of a name and its keys, and each but the first begins at one of
    `milestones`, with its own step 0. A schedule's run ends where the next one begins."""
    if not schedules:
        raise ConfigError("optimizer.schedules must name the schedules that follow each other, found none")
    at = [warmup_steps, *(milestones or ())]
    if len(at) != len(schedules) or at != sorted(set(at)):
        raise ConfigError(f"optimizer.schedules are {len(schedules)} schedules, which want {len(schedules) - 1} milestones in "
                          f"rising order after the {warmup_steps} steps of warm-up, found optimizer.milestones = "
                          f"{list(milestones or ())}")
    ends = [*at[1:], max(total_steps, at[-1] + 1)]
    parts = [made(i, schedules[i], lr, min_lr, end - begin) for i, (begin, end) in enumerate(zip(at, ends))]

    def rate(step: int) -> float:
        i = max(0, bisect_right(at, step) - 1)
        return parts[i](step - at[i])
    return rate


def chained(*, lr: float, min_lr: float, warmup_steps: int, total_steps: int, schedules: Sequence[Mapping[str, Any]] = ()
            ) -> Rate:
    """lr times what each of `schedules` (tables of a name and its keys) makes of a rate of 1, at least min_lr."""
    if not schedules:
        raise ConfigError("optimizer.schedules must name the schedules that are multiplied, found none")
    parts = [made(i, entry, 1.0, 0.0, total_steps - warmup_steps) for i, entry in enumerate(schedules)]
    return lambda step: max(min_lr, lr * math.prod(part(step - warmup_steps) for part in parts))


def made(i: int, entry: Any, lr: float, min_lr: float, steps: int) -> Rate:
    """The schedule of the i-th table, for a run of its own of so many steps; its rates, warm-up and end may be its own, too.

    Its name may be a function like those in SCHEDULES.
    """
    found = entry.get("name") if isinstance(entry, Mapping) else None
    if not isinstance(found, str) and not callable(found):
        raise ConfigError(f'optimizer.schedules[{i}] must be a table with a name, such as {{name = "cosine"}}, found {entry!r}')
    name, make = (found, SCHEDULES.resolve(found)) if isinstance(found, str) else (named(found), found)
    keys, known = {key: value for key, value in entry.items() if key != "name"}, parameters_of(make)
    for key in keys:
        if key not in known:
            raise ConfigError(f'optimizer.schedules[{i}]: "{name}" has no key {key}{nearest(key, known)}')
    try:
        rate = schedule(make, **{"lr": lr, "min_lr": min_lr, "total_steps": max(1, steps), **keys})
    except ConfigError as error:
        raise ConfigError(f'optimizer.schedules[{i}], "{name}": {error.message}') from None
    if isinstance(rate, Adaptive):
        raise ConfigError(f'optimizer.schedules[{i}]: "{name}" follows the evaluations, and cannot be one of several')
    return rate


class plateau(Adaptive):  # noqa: N801  (a schedule like the others)
    """lr, times `factor` whenever `patience` evaluations have passed without a better validation loss, at least min_lr.

    Better is lower than the best by `threshold` of it ("rel") or by that ("abs"). After a fall, `cooldown` evaluations are not
    counted. A fall by `lr_eps` (PyTorch's `eps`, which is the optimizer's in a configuration) or less is none. The state is in
    checkpoints.
    """

    def __init__(self, *, lr: float, min_lr: float, warmup_steps: int, total_steps: int, factor: float = 0.1, patience: int = 10,
                 threshold: float = 1e-4, threshold_mode: str = "rel", cooldown: int = 0, lr_eps: float = 1e-8):
        if not 0.0 < factor < 1.0 or patience < 0 or cooldown < 0 or threshold_mode not in ("rel", "abs"):
            raise ConfigError("schedule plateau wants a factor in (0, 1), patience and cooldown of 0 or more and threshold_mode "
                              f'"rel" or "abs", found {factor}, {patience}, {cooldown} and "{threshold_mode}"')
        if not (threshold >= 0.0 and lr_eps >= 0.0):
            raise ConfigError(f"schedule plateau wants threshold and lr_eps of 0 or more, found {threshold} and {lr_eps}")
        self.peak, self.min_lr, self.warmup_steps, self.factor, self.patience = lr, min_lr, warmup_steps, factor, patience
        self.threshold, self.relative, self.cooldown, self.lr_eps = threshold, threshold_mode == "rel", cooldown, lr_eps
        self.lr, self.best, self.bad, self.waits = lr, math.inf, 0, 0

    def __call__(self, step: int) -> float:
        return self.lr * (step + 1) / (self.warmup_steps + 1) if step < self.warmup_steps else self.lr

    def observe(self, loss: float) -> None:
        wanted = self.best * (1.0 - self.threshold) if self.relative else self.best - self.threshold
        if loss < wanted:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
        if self.waits > 0:
            self.waits, self.bad = self.waits - 1, 0
        if self.bad > self.patience:
            lower = max(self.lr * self.factor, self.min_lr)
            if self.lr - lower > self.lr_eps:
                self.lr = lower
            self.waits, self.bad = self.cooldown, 0

    def record(self) -> dict[str, Any]:
        return {"lr": self.lr, "best": self.best if math.isfinite(self.best) else None, "bad": self.bad, "waits": self.waits}

    def restore(self, record: dict[str, Any]) -> None:
        best = record["best"]
        self.lr, self.best = float(record["lr"]), math.inf if best is None else float(best)
        self.bad, self.waits = int(record["bad"]), int(record["waits"])
