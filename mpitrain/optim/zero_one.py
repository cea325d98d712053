"""0/1 Adam (Lu et al., 2022): the variance is renewed at growing intervals, and then ranks meet at growing intervals.

    step 1 .. freeze      dense at steps whose distance grows 1, 2, 4, ...: v is renewed, as AdamW does it
                          the others at 1 bit, as in `one_bit`, with the v of the last dense one
    after it              rounds of 1, 2, 4, ... `local_steps` steps: each rank goes on by its own gradients, and at the end of a
                          round the sum of rates times momenta, u, is exchanged at 1 bit

Within a round rank i has m_i = beta1 m_i + (1 - beta1) n g_i, u_i = u_i + rate m_i, and w_i = K w_0 - u_i / root, where w_0 is
what all had at its start and K the weight decay of its steps. At its end all have w = K w_0 - u / root and m = u / (sum of
rates), of the mean u over ranks: what travels is that m, so that what rounding left out has the same units at any rate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.optim.layout import Allocate, Segment
from mpitrain.optim.one_bit import BLOCK, DENSE, LOCAL, PACKED, OneBit, steps_of
from mpitrain.optim.optimizer import require
from mpitrain.optim.rules import AdamW


class ZeroOneAdam(OneBit, AdamW):
    """`variance_every` renewals of v double their distance, and `local_every` steps that of exchanges, up to `local_steps`; 1
    means an exchange at each step. Both may be shares of the run's steps, below 1. The last step of a run ends a round.

    Between exchanges ranks have parameters, m and u of their own: `drifts`.
    """

    own = ("m", "u")

    def __init__(self, model: Any, lr: float = 1e-3, *, freeze: float = 0.25, v_floor: float = 0.01, variance_every: float = 0.1,
                 local_steps: int = 4, local_every: float = 0.1, betas: Sequence[float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.01, decay: str = "all", allocate: Allocate | None = None):
        require(local_steps >= 1, "local_steps", local_steps, "1 or more")
        for name, value in (("variance_every", variance_every), ("local_every", local_every)):
            require(0.0 < value < math.inf and (value < 1.0 or value == int(value)), name, value,
                    "a number, or a share of the run's steps below 1")
        super().__init__(model, lr, betas=betas, eps=eps, weight_decay=weight_decay, decay=decay, allocate=allocate)
        self.with_freeze(freeze, v_floor)
        self.variance_every, self.local_steps, self.local_every = variance_every, local_steps, local_every
        for name in ("u", "start"):                           # `start` has the parameters at the start of a round.
            self.state[name] = self.storage.new_flat(allocate or self.storage.allocate)
        # Of the round: its steps so far, the sum of their rates, and the product of their weight decays.
        self.numbers["round"] = np.array([0.0, 0.0, 1.0])
        self._plan: tuple[Any, ...] = ()
        self._kinds: dict[int, str] = {}                      # Steps that are not PACKED after the freeze, or not before it.
        self._renewals: list[int] = []                        # The steps that renew v, ...
        self._first = 0                                       # ... of which so many come first.

    def exchange(self, step: int) -> str:
        after = self.frozen_after
        if not after:
            return DENSE
        if self._plan != (after, self.total):
            self._plan_steps(after)
        return self._kinds.get(step, PACKED)

    def _plan_steps(self, after: int) -> None:
        self._plan = after, self.total
        self._renewals = renewals(after, max(1, steps_of(self.variance_every, self.total)))
        self._first = sum(step == i for i, step in enumerate(self._renewals, 1))
        self._kinds = dict.fromkeys(self._renewals, DENSE)
        ends = set(round_ends(self.total - after, self.local_steps, max(1, steps_of(self.local_every, self.total))))
        self._kinds |= {after + i: LOCAL for i in range(1, self.total - after + 1) if i not in ends}

    @property
    def variance_step(self) -> int:
        self.exchange(1)
        return bisect_right(self._renewals, self.steps)

    def plain(self, step: int) -> bool:
        return not self.frozen_after or step <= self._first

    def drifts(self, step: int) -> bool:
        """Whether ranks have parameters of their own after a step."""
        return self.exchange(step) == LOCAL

    def scalars(self, decay: float, lr: float, step: int, scale: float) -> tuple[float, ...]:
        found = super().scalars(decay, lr, step, scale)
        if self.frozen_after:                                 # v is a mean over the steps that renew it.
            found = (*found[:6], super().scalars(decay, lr, self.variance_step, scale)[6], *found[7:])
        return found

    def parts(self, run: Any) -> tuple[Array, ...]:
        return super().parts(run)[:3]                         # AdamW's own: without u and start.

    def put(self, part: Array, start: int, step: int, lr: float = 0.0) -> None:
        steps, rates, _ = self.numbers["round"]
        if not steps:
            super().put(part, start, step, lr)
            return
        beta1, rate = self.betas[0], lr / (1.0 - self.betas[0] ** step)
        m, u = (self.state[name][start:start + part.size] for name in "mu")
        for first in range(0, part.size, BLOCK):
            own = slice(first, first + BLOCK)
            block = part[own]
            block *= (1.0 - beta1) * self.workers
            block += beta1 * m[own]
            if rates + rate > 0.0:                            # Else rates are zero: the last momentum stands for the round's.
                block *= rate
                block += u[own]
                block /= rates + rate
            block /= self.workers

    def update(self, gradients: Array, *, lr: float, step: int, scale: float = 1.0,
               segments: Sequence[Segment] | None = None, numbers: Array | None = None) -> None:
        kind, own = self.exchange(step), self.numbers["round"]
        self.steps = step
        if kind == LOCAL and not own[0]:
            self.state["start"][...] = self.storage.values
        if kind != DENSE:
            rate = lr / (1.0 - self.betas[0] ** step)
            own[:] = own[0] + 1.0, own[1] + rate, own[2] * (1.0 - lr * self.weight_decay)
        super().update(gradients, lr=lr, step=step, scale=scale, segments=segments, numbers=numbers)
        if kind == PACKED:
            if own[0] > 1:
                self.state["u"].fill(0)
            own[:] = 0.0, 0.0, 1.0

    def arrived(self, segment: Segment, m: Array, lr: float, step: int, decay: float) -> None:
        own, kind, beta1 = slice(segment.start, segment.stop), self.exchange(step), self.betas[0]
        w, kept, v, u, begun = (flat[own] for flat in (self.storage.values, *self.state.values()))
        steps, rates, shrunk = self.numbers["round"]
        rate, shrink = lr / (1.0 - beta1 ** step), shrunk if decay else 1.0
        if kind == DENSE:                                     # m has the noise of signs, so that v needs its floor here, too.
            v *= self.betas[1]
            v += (1.0 - self.betas[1]) * m * m
            self._floors.pop(segment.start, None)
            steps, rates, shrink = 1.0, rate, 1.0 - lr * decay
        since = w if steps == 1 and kind != LOCAL else begun
        for first in range(0, w.size, BLOCK):
            part = slice(first, min(first + BLOCK, w.size))
            if kind == PACKED:
                kept[part] = m[part]
            else:
                kept[part] *= beta1
                kept[part] += (1.0 - beta1) * (self.workers if kind == LOCAL else 1) * m[part]
            moved = rates * kept[part]
            if kind == LOCAL:
                kept[part][v[part] == 0] = 0
                u[part] += rate * kept[part]
                moved = u[part]
            w[part] = shrink * since[part] - moved / self.root(segment, part.start, part.stop)

    def recompute(self) -> None:
        shrunk = self.numbers["round"][2]
        for segment in self.storage.segments:
            own = slice(segment.start, segment.stop)
            w, u, begun = self.storage.values[own], self.state["u"][own], self.state["start"][own]
            for first in range(0, w.size if segment.parameter.requires_grad else 0, BLOCK):
                part = slice(first, min(first + BLOCK, w.size))
                shrink = shrunk if self.decay_of(segment) else 1.0
                w[part] = shrink * begun[part] - u[part] / self.root(segment, part.start, part.stop)

    def restart(self) -> None:
        super().restart()
        self.numbers["round"][:] = 0.0, 0.0, 1.0


def renewals(after: int, every: int) -> list[int]:
    """The steps up to `after`, 1 and itself among them, that renew v: their distance doubles after each `every` of them."""
    steps, at = list[int](), 1
    while at <= after:
        steps.append(at)
        at += 1 << min(len(steps) // every, 62)
    return steps if not steps or steps[-1] == after else [*steps, after]


def round_ends(steps: int, most: int, every: int) -> list[int]:
    """The last step of each round among `steps`: rounds of 1, then of twice as many after each `every` steps, up to `most`."""
    ends, begun = list[int](), 0
    while begun < steps:
        begun = min(steps, begun + min(most, 1 << min(begun // every, 62)))
        ends.append(begun)
    return ends
