"""One step's update: reduction, norm, clipping and the optimizer's step, together, because their order is the policy.

`Replicated`: every rank holds all parameters and optimizer state, sums all gradients, and does the same update on the same
bits. Other policies (one copy per node, sharded states, scaled losses) order these differently and are objects of the same
two methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypedDict

from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import NumericsError
from mpitrain.nn import Module, apply_statistics, running_layers
from mpitrain.optim import Optimizer, clip_factor
from mpitrain.parallel.gradients.norm import GradientNorm
from mpitrain.parallel.gradients.reducer import GradientReducer
from mpitrain.parallel.gradients.statistics import PlainStatistics, Statistics
from mpitrain.parallel.pipeline.tied import Twins
from mpitrain.placement.bytes import Bytes


class Outcome(TypedDict):
    """What a step did: the learning rate, the global norm before clipping (None where nobody asked), waiting time."""

    lr: float
    grad_norm: float | None
    comm_exposed_s: float


class Replicated:
    """All parameters on every rank.

    With `clip_norm` the gradient is scaled so that its global norm (Pascanu, Mikolov, Bengio, 2013) is at most that. The norm
    costs a pass over the gradients, so without clipping it is computed only when `want_norm` is set for the step.
    """

    def __init__(self, model: Module, optimizer: Optimizer, reducer: GradientReducer, channel: Channel,
                 rate: Callable[[int], float], *, clip_norm: float = 0.0, statistics: Statistics | None = None,
                 norm: GradientNorm | None = None, twins: Twins | None = None):
        self.model, self.optimizer, self.reducer, self.channel, self.rate = model, optimizer, reducer, channel, rate
        self.norm, self.twins = norm or GradientNorm(reducer.storage), twins
        self.clip_norm, self._layers = clip_norm, running_layers(model)
        self.statistics = statistics or PlainStatistics(model, channel)
        self.step = 0                                       # updates done
        self.want_norm = True

    def begin(self) -> None:
        """To be called before the first forward of a step."""
        self.reducer.begin()

    def finish(self) -> Outcome:
        """The rest of the exchange, then the update. Raises NumericsError before any parameter changes."""
        gradients = self.reducer.finish()
        if self.twins is not None:
            self.twins.add(gradients)
        lr, (norm, scale) = self.rate(self.step), self._norm_and_scale(gradients)
        self.optimizer.update(gradients, lr=lr, step=self.step + 1, scale=scale)
        self._update_buffers()
        self.step += 1
        return {"lr": lr, "grad_norm": norm, "comm_exposed_s": self.reducer.exposed_s}

    def measured(self) -> Bytes:
        """The bytes of this rank's parameters, gradients and optimizer state, by asking their arrays."""
        state = self.optimizer.state.values()
        return Bytes(self._values_nbytes, self.reducer.gradients.nbytes, sum(array.nbytes for array in state))

    @property
    def _values_nbytes(self) -> int:
        storage: Any = self.reducer.storage
        return int(storage.values.nbytes)

    def _norm_and_scale(self, gradients: Any) -> tuple[float | None, float]:
        """The norm, where it is wanted, and the factor of clipping. NumericsError where the norm is not finite."""
        if not (self.clip_norm or self.want_norm):
            return None, 1.0
        norm = self.norm(gradients)
        if not math.isfinite(norm):
            raise NumericsError(f"the gradient of {self.norm.worst(gradients)} is not finite; no parameter was changed; "
                                "try a smaller optimizer.lr, or optimizer.clip_norm", step=self.step)
        return norm, clip_factor(norm, self.clip_norm) if self.clip_norm else 1.0

    def _update_buffers(self) -> None:
        """Running statistics: the mean over all micro-batches of all ranks, once a step."""
        statistics = self.statistics.total()
        if statistics.size:
            apply_statistics(self._layers, statistics)
