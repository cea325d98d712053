"""Whole parameters on every rank, for an optimizer that says what ranks send in the place of gradients (`optim.one_bit`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpitrain.backend import Array
from mpitrain.optim.one_bit import OneBit
from mpitrain.parallel.compress.one_bit import MomentumSum
from mpitrain.parallel.gradients.bucket_sum import BucketSum
from mpitrain.parallel.policies.replicated import Replicated


class OneBitReplicated(Replicated):
    """`Replicated` until the optimizer's freeze, to the bit."""

    optimizer: OneBit
    _ended = -1                                               # The step after which the run was over, within a round.

    def bucket_sum(self) -> BucketSum:
        made = MomentumSum(self.channel, self.layout, self.optimizer, step=lambda: self.step - self.began,
                           rate=lambda: self.rate(self.step - self.behind), seed=self.setup.config.run.seed)
        self.compressed = made
        return made

    def way(self) -> str:
        return f"{super().way()} after step {self.optimizer.frozen_after}"

    @property
    def drifts(self) -> bool:
        """Whether ranks have parameters of their own after the last step."""
        return self._ended != self.optimizer.steps and self.optimizer.drifts(self.optimizer.steps)

    def recompute(self) -> None:
        """Parameters after a step within a round, of what its ranks had at its start and what this one has by itself."""
        if self.drifts:
            self.optimizer.recompute()
            self._changed()

    def unlike(self, step: int) -> Sequence[str]:
        own = ("parameters", "optimizer") if self.optimizer.drifts(step - self.began) else ()
        return (*super().unlike(step), *own)

    @contextmanager
    def mean_in_use(self) -> Iterator[None]:
        """The model computes with the mean of the ranks' parameters inside, where they are not alike. It communicates."""
        if not self.drifts:
            yield
            return
        own = self._take_mean()
        yield                                                 # An error inside ends the run.
        self.values[...] = own
        self._changed()

    def end(self) -> None:
        """The run is over, perhaps within a round: the mean of the ranks' parameters is its result. It communicates."""
        if self.drifts:
            self._take_mean()
            self._ended = self.optimizer.steps

    def _take_mean(self) -> Array:
        """Parameters become the mean over the ranks; this rank's own. It communicates."""
        own = self.values.copy()
        self.values /= self.channel.size
        self.channel.allreduce(self.values, name="mean of the ranks")
        for s in self.layout.segments:
            if not s.parameter.requires_grad:                 # Ranks have these alike, and a mean would round them.
                self.values[s.start:s.stop] = own[s.start:s.stop]
        self._changed()
        return own

    def _changed(self) -> None:
        for segment in self.layout.segments:
            segment.parameter.mark_changed()

    def _norm_and_scale(self, gradients: Any) -> tuple[float | None, float]:
        """No norm of what is this rank's alone."""
        return (None, 1.0) if self.optimizer.drifts(self.step + 1 - self.began) else super()._norm_and_scale(gradients)
