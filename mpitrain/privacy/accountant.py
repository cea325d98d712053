"""How much privacy a run has spent: steps are counted, and told as an epsilon at a delta.

The claim is (epsilon, delta)-differential privacy for neighbours that differ by one row, or one client, that is there or not; it
holds for parts drawn by a Poisson sampler, each for itself, and for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from mpitrain.errors import ConfigError
from mpitrain.privacy.renyi import renyi_divergence

ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)      # those of dp-accounting 0.6.0
MOST_NOISE = float(1 << 17)    # of a bisection; beyond it the sum of 100,000 parts is less than its noise
CLOSE = 1e-6                   # relative, of the noise that a bisection finds
NOTHING: Mapping[tuple[float, float], int] = {}


class Accountant(Protocol):
    """A registry entry, made without arguments: epsilon at `delta` after {(q, sigma): steps}; it never falls with steps."""

    def epsilon(self, history: Mapping[tuple[float, float], int], delta: float) -> float: ...


class RenyiAccountant:
    """Renyi differential privacy of Poisson-sampled Gaussian steps, which adds up over steps order by order."""

    def __init__(self, orders: Sequence[float] = ORDERS):
        self.orders = tuple(orders)
        self._divergences = lru_cache(64)(self._of_step)      # A run has one (q, sigma), a bisection a few dozen.

    def _of_step(self, q: float, sigma: float) -> tuple[float, ...]:
        return tuple(renyi_divergence(q, sigma, order) for order in self.orders)

    def epsilon(self, history: Mapping[tuple[float, float], int], delta: float) -> float:
        totals = [0.0] * len(self.orders)
        for (q, sigma), steps in history.items():
            if steps:
                totals = [total + steps * one for total, one in zip(totals, self._divergences(q, sigma))]
        return epsilon_of(self.orders, totals, delta)


def epsilon_of(orders: Sequence[float], divergences: Sequence[float], delta: float) -> float:
    """The smallest epsilon that follows at `delta` from Renyi divergences, by the tight conversion of Canonne, Kamath and Steinke
    (2020, proposition 12):  epsilon = D + log(1 - 1/order) - log(delta order) / (order - 1).

    A divergence so small that the total variation is below delta (Bretagnolle, Huber) costs nothing.
    """
    best = math.inf
    for order, divergence in zip(orders, divergences):
        if delta * delta + math.expm1(-divergence) > 0:
            return 0.0
        if order > 1.01 and delta > 0:                        # the conversion is unstable towards order 1, and useless there
            best = min(best, divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    return max(0.0, best)


def noise_for(accountant: Accountant, epsilon: float, delta: float, q: float, steps: int,
              history: Mapping[tuple[float, float], int] = NOTHING) -> float:
    """The smallest noise multiplier, to 1e-6, with which `steps` after a `history` bring the cost to `epsilon` at most;
    ConfigError where none does."""
    def cost(sigma: float) -> float:
        return accountant.epsilon({**history, (q, sigma): steps + history.get((q, sigma), 0)}, delta)
    low, high = 0.0, 1.0
    while (least := cost(high)) > epsilon:
        if high >= MOST_NOISE:
            spent = f"with {accountant.epsilon(history, delta):.3g} spent before, " if history else ""
            raise ConfigError(f"privacy.epsilon = {epsilon:g} cannot be had: {spent}at delta {delta:g}, {steps} steps that draw "
                              f"a share of {q:g} cost {least:.3g} even with noise {high:g}; raise privacy.epsilon, or train "
                              "fewer steps")
        low, high = high, high * 2
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return high


class Spent:
    """The steps that a run has done on the private data, which only grow: they outlive a resume, and a return to an earlier
    checkpoint, whose steps have been seen all the same."""

    def __init__(self, accountant: Accountant, delta: float):
        self.accountant, self.delta = accountant, delta
        self.history: dict[tuple[float, float], int] = {}

    def add(self, q: float, sigma: float, steps: int = 1) -> None:
        assert steps >= 0
        self.history[q, sigma] = self.history.get((q, sigma), 0) + steps

    def epsilon(self) -> float:
        return self.accountant.epsilon(self.history, self.delta)

    def record(self) -> list[list[float]]:
        """The history as plain JSON data: [q, sigma, steps]."""
        return [[q, sigma, steps] for (q, sigma), steps in self.history.items()]

    def restore(self, record: Sequence[Sequence[float]]) -> None:
        """Takes a `record`; of each (q, sigma) the larger count stays. ValueError or TypeError for anything else."""
        found = {}
        for q, sigma, steps in record:
            if not (0 <= q <= 1 and sigma >= 0 and steps >= 0 and int(steps) == steps):
                raise ValueError(f"{steps!r} steps of ({q!r}, {sigma!r})")
            found[float(q), float(sigma)] = int(steps)
        for key, steps in found.items():
            self.history[key] = max(steps, self.history.get(key, 0))
