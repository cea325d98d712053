"""Sites that meet their neighbours in a graph: gossip as a level of exchange."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import sqrt
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.backend import Array, array_module, asnumpy
from mpitrain.optim import Segment
from mpitrain.parallel.levels.gossip import Gossip
from mpitrain.parallel.levels.gradients import GradientMean
from mpitrain.parallel.levels.level import Level
from mpitrain.schedules.graph_check import Proved

if TYPE_CHECKING:
    from mpitrain.parallel.policies.policy import Policy

SAMPLE = 1024                  # Parameters of a rank that `drift` looks at, evenly spread: 8 KiB to send for a line of metrics.


class Neighbours(Level):
    """A round of gossip each `every` steps, once `after` steps have summed gradients over all sites.

    Parameters leave before the first forward of a step, and their average with the neighbours' is there when its update is due;
    a rank sends what its optimizer updates, to the ranks in its place on other sites. Sites have never quite the same
    parameters, and `apart` says so.
    """

    needs_gradients = True                                    # The average must be there before the first update.
    trains_apart = True

    def __init__(self, policy: Policy, graph: Proved, *, every: int = 1, after: int = 0):
        super().__init__(policy)
        self.graph, self.every, self.after = graph, every, after
        self.places, at = list[tuple[Segment, slice]](), 0
        for s in self.trained:
            self.places.append((s, slice(at, at + s.stop - s.start)))
            at += s.stop - s.start
        self.gossip = Gossip(self.channel, graph, self.size, self.storage.dtype)
        self._dense = GradientMean(self) if after else None
        self._under_way, self._waited_s = False, 0.0
        self._told, self._since = 0, 0                        # The bytes, and the step, of the line of metrics before.
        self._weights = np.ones(self.n_sites)

    def due(self, step: int) -> bool:
        """Whether a round leaves before the step after `step` updates."""
        return step > self.after and (step - self.after) % self.every == 0

    def begin(self, step: int) -> None:
        if self.due(step):
            self._pack()
            self.count(self.gossip.start())
            self._under_way = True

    def mix(self, gradients: Any) -> bool:
        if self._dense is not None:
            return self._dense(gradients)
        if self._under_way:
            self._under_way = False
            began = perf_counter()
            found = self.gossip.finish()
            self._waited_s += perf_counter() - began
            self.policy.settle()                              # Nobody writes before all have read.
            for s, there in self.places:
                values = self.storage.values[s.start:s.stop]
                values[...] = array_module(values).asarray(found[there])
        return True

    @property
    def rate_factor(self) -> float:                           # type: ignore[override]
        """Push-sum subtracts the gradient from x, and the parameters are x / w."""
        return 1.0 / self.gossip.weight

    def end(self, step: int, lr: float) -> None:
        if step <= self.after:
            self.meet_running()
            if step == self.after:
                self._dense = None                            # Its memory is wanted no more.
            return
        self.apart = True
        self.fields = self._tell(step) if self.policy.want_norm else {}

    def _tell(self, step: int) -> dict[str, float]:
        """What a line of metrics says. `drift` is the root mean square of the sites' distances from their mean over that of the
        mean, by a sample of the parameters. The seconds of waiting for neighbours, since the line before, are of the rank that
        waited least; the bytes of the one that sent most, a step. It communicates."""
        self._pack()
        sample = self.gossip.outgoing[::max(1, -(-self.size // SAMPLE))].astype(np.float64)
        mean, control = sample.copy(), self.policy.context.control
        self.channel.allreduce(mean, name="mean of a sample")
        mean /= self.n_sites
        told = np.zeros(2 + 2 * control.size)
        told[:2] = ((sample - mean) ** 2).sum(), (mean ** 2).sum()
        told[2 + control.rank::control.size] = self._waited_s, self.sent_bytes - self._told
        control.allreduce(told, name="drift")
        (apart, size), (waited, sent) = told[:2], told[2:].reshape(2, -1)
        steps, self._waited_s, self._told, self._since = max(1, step - self._since), 0.0, self.sent_bytes, step
        return {"round": self.gossip.round, "drift": sqrt(apart / size) if size else 0.0, "sync_exposed_s": float(waited.min()),
                "wire_bytes": float(sent.max()) / steps}

    def _pack(self) -> None:
        for s, there in self.places:
            self.gossip.outgoing[there] = asnumpy(self.storage.values[s.start:s.stop])

    # -- the mean, and checkpoints ---------------------------------------------------------------------------------------

    def mean_of(self, flat: Array) -> None:
        """Under push-sum the mean of x: sites count as their scalars, whose sum is their number."""
        flat *= flat.dtype.type(self.gossip.weight)
        super().mean_of(flat)

    def numbers(self) -> dict[str, Any]:
        """The scalars of push-sum, of all sites."""
        return {"weights": self._weights}

    def take_numbers(self, found: dict[str, Any]) -> None:
        self._weights = np.array(found["weights"], np.float64)
        self.gossip.weight = float(self._weights[self.site])

    def wait(self) -> None:
        """No round is under way between steps; the sites tell their scalars."""
        self._weights = np.zeros(self.n_sites)
        self._weights[self.site] = self.gossip.weight
        self.channel.allreduce(self._weights, name="weights of push-sum")

    def resume(self, step: int, apart: bool, there: Mapping[str, Collection[str]]) -> str:
        self.apart = apart
        if step >= self.after:
            self._dense = None
        self.gossip.round, self._since = max(0, (step - 1 - self.after) // self.every), step
        return ""

    @property
    def nbytes(self) -> int:
        return self.gossip.nbytes
