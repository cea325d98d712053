"""Optimizers whose ranks exchange their momentum at 1 bit an element once its variance has settled.

    step 1 .. freeze      gradients are summed as they are; the rule is that of AdamW or LAMB, to the bit
    after it              rank i of n sends beta1 m / n + (1 - beta1) g_i, rounded to signs and a scale a block, with feedback of
                          what rounding left out; the sum that arrives is the new m, and v stays as it is

Letters as in `rules`; g_i is rank i's part of the gradient, so that g = g_1 + ... + g_n. A sign cannot say 0: elements whose v is
0 at the freeze, which never had a gradient, send and keep 0. v is at least `v_floor` times the mean of its layer: an element with
next to no variance would step by as much as its block's scale over its root, which ends in NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.errors import ConfigError
from mpitrain.optim.layout import Allocate, Condensed, Segment
from mpitrain.optim.norm import sum_of_squares
from mpitrain.optim.optimizer import Held, Optimizer, Run, require
from mpitrain.optim.rules import LAMB, AdamW

DENSE, PACKED, LOCAL = "dense", "packed", "local"             # what ranks do with the buckets of a step
BLOCK = 1 << 14                                               # elements of each array, which lie in the cache together


class OneBit(Optimizer):
    """What the optimizers here have in common; `planned` says how long the run is. Until then all steps are dense, so that in a
    loop of one's own, which has no exchange, they are AdamW and LAMB.

    `freeze` is a number of steps, or below 1 a share of the run's; `workers` is the number of ranks that sum gradients.
    """

    sends = True
    own: Sequence[str] = ()                                   # The states that ranks have by themselves while they drift.
    betas: tuple[float, float]
    eps: float
    freeze: float
    v_floor: float

    def with_freeze(self, freeze: float, v_floor: float) -> None:
        """Takes the arguments of their own that all of these have."""
        require(0.0 < freeze < math.inf and (freeze < 1.0 or freeze == int(freeze)), "freeze", freeze,
                "a number of steps, or a share of the run's steps below 1")
        require(0.0 <= v_floor <= 1.0, "v_floor", v_floor, "a share of a layer's mean, in [0, 1]")
        self.freeze, self.v_floor, self.workers, self.total = freeze, v_floor, 1, 0
        self.numbers["frozen_after"] = np.array(0)            # The last step of the warm-up; 0: nobody has said.
        self._floors: dict[int, float] = {}                   # Of each segment, by its start.

    def planned(self, steps: int, workers: int) -> None:
        """Tells the number of steps of the run, and of ranks that sum gradients. ConfigError for a freeze that never comes."""
        after = steps_of(self.freeze, steps)
        if not 0 < after < steps:
            raise ConfigError(f"optimizer.freeze = {self.freeze:g} is step {after} of a run of {steps}, and must come after the "
                              'first and before the last one; set it to a share such as 0.25, or optimizer.name = "adamw"')
        self.numbers["frozen_after"][...], self.workers, self.total = after, workers, steps

    @property
    def frozen_after(self) -> int:
        """The last step of the warm-up."""
        return int(self.numbers["frozen_after"])

    def exchange(self, step: int) -> str:
        """What ranks do with the buckets of this step, counted from 1."""
        return PACKED if 0 < self.frozen_after < step else DENSE

    def drifts(self, step: int) -> bool:
        """Whether ranks have parameters of their own after a step."""
        return False

    def recompute(self) -> None:
        """Parameters after a step after which ranks drift, once the states are there."""

    def plain(self, step: int) -> bool:
        """Whether no step before this one was at 1 bit, so that m has no noise of signs."""
        return True

    def put(self, part: Array, start: int, step: int, lr: float = 0.0) -> None:
        """Turns this rank's gradients, elements `start` and following, into what it sends in a step that is packed."""
        beta1 = self.betas[0]
        m = self.state["m"][start:start + part.size]
        for first in range(0, part.size, BLOCK):
            block = part[first:first + BLOCK]
            block *= 1.0 - beta1
            block += (beta1 / self.workers) * m[first:first + BLOCK]

    def never(self, start: int, stop: int) -> Array:
        """Whether each of these elements never had a gradient: such ones send and keep 0. Also those between parameters."""
        found: Array = self.state["v"][start:stop] == 0
        return found

    def update(self, gradients: Array, *, lr: float, step: int, scale: float = 1.0,
               segments: Sequence[Segment] | None = None, numbers: Array | None = None) -> None:
        if self.exchange(step) == DENSE and self.plain(step):
            super().update(gradients, lr=lr, step=step, scale=scale, segments=segments, numbers=numbers)
            self._floors.clear()
            return
        changed = [s for s in (self.storage.segments if segments is None else segments) if s.stop > s.start]
        for s in changed:
            if s.parameter.requires_grad:
                self.arrived(s, gradients[s.start:s.stop], lr, step, self.decay_of(s))
            s.parameter.mark_changed()
        self.steps = step

    def decay_of(self, segment: Segment) -> float:
        """The weight decay of a parameter."""
        return self.weight_decay if segment.decay and (segment.parameter.ndim >= 2 or self.decay == "all") else 0.0

    def arrived(self, segment: Segment, m: Array, lr: float, step: int, decay: float) -> None:
        """The update of one parameter by the sum that has arrived."""
        raise NotImplementedError

    def root(self, segment: Segment, first: int, stop: int) -> Array:
        """sqrt(v^) + eps of elements first:stop of a parameter, with the floor; 1 where there never was a gradient."""
        v = self.state["v"][segment.start + first:segment.start + stop]
        found: Array = np.sqrt(np.maximum(v, v.dtype.type(self.floor(segment))))
        found *= 1.0 / math.sqrt(1.0 - self.betas[1] ** self.variance_step)
        found += self.eps
        return found

    def floor(self, segment: Segment) -> float:
        """The least v of a parameter's elements."""
        if segment.start not in self._floors:
            v = self.state["v"][segment.start:segment.stop]
            known = v[v > 0]
            self._floors[segment.start] = self.v_floor * float(known.mean(dtype=np.float64)) if known.size else 0.0
        return self._floors[segment.start]

    @property
    def variance_step(self) -> int:
        """The number of means that v is of."""
        return self.frozen_after

    def restart(self) -> None:
        super().restart()
        self._floors.clear()


def steps_of(given: float, steps: int) -> int:
    """A number of steps, which may be given as a share of all."""
    return round(given * steps) if given < 1.0 else int(given)


class OneBitAdam(OneBit, AdamW):
    """Tang et al., 2021: after the freeze w -= lr m^ / (sqrt(v^) + eps) with the v of the freeze; before it AdamW."""

    def __init__(self, model: Any, lr: float = 1e-3, *, freeze: float = 0.25, v_floor: float = 0.01,
                 betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01, decay: str = "all",
                 allocate: Allocate | None = None):
        super().__init__(model, lr, betas=betas, eps=eps, weight_decay=weight_decay, decay=decay, allocate=allocate)
        self.with_freeze(freeze, v_floor)

    def arrived(self, segment: Segment, m: Array, lr: float, step: int, decay: float) -> None:
        own = slice(segment.start, segment.stop)
        w, kept = self.storage.values[own], self.state["m"][own]
        rate = lr / (1.0 - self.betas[0] ** step)
        for first in range(0, w.size, BLOCK):
            part = slice(first, min(first + BLOCK, w.size))
            kept[part] = m[part]
            if decay:
                w[part] *= 1.0 - lr * decay
            w[part] -= rate * (kept[part] / self.root(segment, part.start, part.stop))


class OneBitLAMB(OneBit, LAMB):
    """Li et al., 2021: each layer keeps the mean ratio of its warm-up, times a factor that follows its variance.

    Before the freeze it is LAMB, and c = coeff_beta c + (1 - coeff_beta) |w|/|r| is the running mean of each matrix's ratio.
    After it the gradient is found again in the momentum, g = (m - beta1 m_before) / (1 - beta1), which gives the variance u that
    would be now; the factor is max(sqrt(v) / sqrt(u)) over the layer, between `factor_min` and `factor_max`, and changes by
    `factor_threshold` of itself in a step at most: w -= lr c factor r.
    """

    whole_parameters = True

    def __init__(self, model: Any, lr: float = 1e-3, *, freeze: float = 0.25, v_floor: float = 0.01,
                 betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.0, decay: str = "matrices",
                 coeff_beta: float = 0.9, factor_min: float = 0.5, factor_max: float = 4.0, factor_threshold: float = 0.1,
                 allocate: Allocate | None = None):
        require(0.0 <= coeff_beta < 1.0, "coeff_beta", coeff_beta, "in [0, 1)")
        require(0.0 < factor_min <= 1.0, "factor_min", factor_min, "in (0, 1]")
        require(1.0 <= factor_max < math.inf, "factor_max", factor_max, "1 or more")
        require(0.0 < factor_threshold < 1.0, "factor_threshold", factor_threshold, "in (0, 1)")
        super().__init__(model, lr, betas=betas, eps=eps, weight_decay=weight_decay, decay=decay, allocate=allocate)
        self.with_freeze(freeze, v_floor)
        self.coeff_beta, self.factor_threshold = coeff_beta, factor_threshold
        self.factors = (factor_min, factor_max)
        self.state["u"] = self.storage.new_flat(allocate or self.storage.allocate)
        self._two = Condensed(self.storage, lambda shape: (2,))
        self.ratios = self._two.new_flat()                    # Of each parameter: the mean ratio, and the last factor.

    def restart(self) -> None:
        super().restart()
        self.ratios.fill(0)

    def held(self) -> list[Held]:
        return [*super().held(), Held("ratio", self._two, self.ratios, shape=lambda shape: (2,))]

    def state_size(self, parameter: Any) -> int:
        return super().state_size(parameter) + 16

    def parts(self, run: Run) -> tuple[Array, ...]:
        return super().parts(run)[:3]                         # LAMB's own: without u, which is of the time after the freeze.

    def took(self, run: Run, ratio: float) -> None:
        kept = self.ratios[self._two.places[run.start]]
        old = float(kept[0]) if kept[0] > 0 else ratio        # The first one begins the mean.
        kept[:] = self.coeff_beta * old + (1.0 - self.coeff_beta) * ratio, 1.0

    def arrived(self, segment: Segment, m: Array, lr: float, step: int, decay: float) -> None:
        own = slice(segment.start, segment.stop)
        w, kept, v, u = (flat[own] for flat in (self.storage.values, self.state["m"], self.state["v"], self.state["u"]))
        direction, root = self._direction[:w.size], self.root(segment, 0, w.size)
        if step == self.frozen_after + 1:
            u[...] = v
        self._follow(u, m, kept)
        kept[...] = m
        np.divide(kept, root, out=direction)
        direction *= 1.0 / (1.0 - self.betas[0] ** step)
        rate = lr
        if segment.parameter.ndim >= 2:
            rate *= self._scaled(segment, direction, decay * w if decay else None, root, u, step)
        if decay:
            direction += decay * w
        direction *= rate
        w -= direction

    def _follow(self, u: Array, m: Array, before: Array) -> None:
        """The running mean of the squares of the gradient that has made m out of what it was `before`."""
        beta1, beta2 = self.betas
        g = m - beta1 * before
        g /= 1.0 - beta1
        g *= g
        u *= beta2
        u += (1.0 - beta2) * g

    def _scaled(self, segment: Segment, direction: Array, shrink: Array | None, root: Array, u: Array, step: int) -> float:
        """The mean ratio of the warm-up times this step's factor, which is kept."""
        kept = self.ratios[self._two.places[segment.start]]
        fresh = u / (1.0 - self.betas[1] ** step)
        np.maximum(fresh, self.floor(segment) / (1.0 - self.betas[1] ** self.variance_step), out=fresh)
        np.sqrt(fresh, out=fresh)
        fresh += self.eps
        factor = float(np.max(np.divide(root, fresh, out=fresh)))
        if shrink is not None:                                # Decay is no part of what the variance divides.
            whole = math.sqrt(sum_of_squares(direction + shrink))
            share = min(1.0, math.sqrt(sum_of_squares(direction)) / whole) if whole > 0.0 else 1.0
            factor = factor * share + 1.0 - share
        last, (least, most), by = float(kept[1]), self.factors, self.factor_threshold
        factor = min(max(factor, least), most)
        kept[1] = min(max(factor, last * (1.0 - by)), last * (1.0 + by))
        return float(kept[0]) * float(kept[1])
