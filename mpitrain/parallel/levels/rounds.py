"""When the fragments of a model leave, and when they take effect: functions of the step alone, equal on all sites."""

from __future__ import annotations

from typing import NamedTuple


class Rounds(NamedTuple):
    """`every` steps a round, from step `after` on; the last one ends with the run, of `steps` steps.

    Of F fragments, number f leaves f H / F steps after the first one of each round of H steps, and lands `delay` steps later.
    With the run's last step all leave, and land at once.
    """

    every: int
    after: int = 0
    fragments: int = 1
    delay: int = 0
    steps: int = 0                                            # 0: the run has no end

    def ends(self, step: int) -> bool:
        """Whether this is the run's last step, which ends the round of all fragments."""
        return step == self.steps

    def leaving(self, step: int) -> list[int]:
        """The fragments that leave after this step."""
        done = step - self.after
        if done <= 0:
            return []
        if self.ends(step):
            return list(range(self.fragments))
        return [f for f in range(self.fragments)
                if done >= self.every and (done - f * self.every // self.fragments) % self.every == 0]

    def landing(self, step: int) -> list[int]:
        """The fragments that take effect after this step, having left before it."""
        if self.ends(step):
            return self.under_way(step - 1)
        return self.leaving(step - self.delay) if self.delay else []

    def under_way(self, step: int) -> list[int]:
        """The fragments that have left by this step, and not landed."""
        return [] if self.ends(step) else [f for s in range(step - self.delay + 1, step + 1) for f in self.leaving(s)]

    def round(self, step: int) -> int:
        """The number of the round that this step is in, or ends, from 1 on."""
        return max(1, -(-(step - self.after) // self.every))

    def ended(self, step: int) -> bool:
        """Whether a round ends with this step."""
        return step > self.after and ((step - self.after) % self.every == 0 or self.ends(step))

    def met(self, step: int) -> bool:
        """Whether all sites have just taken what they agreed on, and nothing is under way."""
        return step <= self.after or self.ends(step) or (
            self.fragments == 1 and self.delay == 0 and (step - self.after) % self.every == 0)
