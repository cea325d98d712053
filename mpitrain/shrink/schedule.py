"""How much is pruned when: the cubic schedule of Zhu and Gupta ("To prune, or not to prune", 2017)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The share of zeros rises from step `begin` to `sparsity` at step `end`; masks are chosen anew each `every` steps.

    Steps count from 1, and 0 is before the first. Where `begin` is `end`, all is pruned at once.
    """

    sparsity: float
    begin: int
    end: int
    every: int

    def at(self, step: int) -> float:
        """sparsity (1 - (1 - t)^3), where t goes from 0 to 1."""
        if step < self.begin:
            return 0.0
        if step >= self.end:
            return self.sparsity
        return self.sparsity * (1.0 - (1.0 - (step - self.begin) / (self.end - self.begin)) ** 3)

    def due(self, step: int) -> bool:
        """Whether masks are chosen after this step's update."""
        return step == self.end or (self.begin <= step < self.end and (step - self.begin) % self.every == 0)
