"""Gradients of sites, added up in each step: the mean over sites, of this step or of one some steps ago.

With a delay of s steps the sum of step t is applied in step t + s, on all sites alike, and travels meanwhile: stale-synchronous
(Ho et al., 2013) with a fixed staleness, so a run has the same bits each time. The first s steps update nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mpitrain.parallel.levels.fragments import Fragment
from mpitrain.parallel.levels.level import Level, Parts

if TYPE_CHECKING:
    from mpitrain.comm.work import Work
    from mpitrain.parallel.policies.policy import Policy


class GradientMean:
    """The mean over the sites of `level` of the gradients that they have, `delay` steps ago."""

    def __init__(self, level: Level, delay: int = 0):
        self.level, self.delay = level, delay
        self._free = [Fragment(0, level.trained, level.storage) for _ in range(delay + 1)]
        self.nbytes: int = self._free[0].message.nbytes       # of each
        self.late: deque[tuple[Work | None, Fragment]] = deque()       # The oldest first; None: the sum is there.
        self.waited_s = 0.0

    def __call__(self, gradients: Any) -> bool:
        """Replaces `gradients`, in the layout of the storage, by the mean of `delay` steps ago; False where there is none yet."""
        now = self._free.pop()
        now.pack(gradients)
        self.late.append((self.level.channel.start_allreduce(now.message, "gradients of sites"), now))
        self.level.count(self.level.posted(now.size))
        if len(self.late) <= self.delay:
            return False
        work, found = self.late.popleft()
        began = perf_counter()
        if work is not None:
            work.wait()
        self.waited_s = perf_counter() - began
        found.message *= found.message.dtype.type(1.0 / self.level.n_sites)
        found.unpack(gradients)
        self._free.append(found)
        return True

    def wait(self) -> None:
        """Waits for all sums."""
        for i, (work, fragment) in enumerate(self.late):
            if work is not None:
                work.wait()
            self.late[i] = None, fragment

    def expect(self, count: int) -> None:
        """Makes room for `count` sums of a checkpoint."""
        self.late.extend((None, self._free.pop()) for _ in range(count))


class SiteGradients(Level):
    """Sites whose parameters stay equal: what they add up is each step's gradient."""

    needs_gradients = True

    def __init__(self, policy: Policy, delay: int = 0):
        super().__init__(policy)
        self.mean = GradientMean(self, delay)
        policy.began = delay                                  # The first update is the optimizer's first step.

    def mix(self, gradients: Any) -> bool:
        return self.mean(gradients)

    def end(self, step: int, lr: float) -> None:
        self.meet_running()
        self.fields = {"sync_exposed_s": self.mean.waited_s, "wire_bytes": self.posted(self.size)}

    def wait(self) -> None:
        self.mean.wait()

    def states(self) -> Mapping[str, Parts]:
        return {f"gradients{k}": fragment.parts(fragment.message) for k, (_, fragment) in enumerate(self.mean.late)}

    def passing(self) -> Sequence[str]:
        return [f"gradients{k}" for k in range(self.mean.delay)]

    def resume(self, step: int, apart: bool, there: Mapping[str, Collection[str]]) -> str:
        if apart:
            return "its sites had parameters of their own"
        if len(there) != min(step, self.mean.delay):
            return f"gradients of {len(there)} steps were under way, and delay = {self.mean.delay} needs others"
        self.mean.expect(len(there))
        return ""

    @property
    def nbytes(self) -> int:
        return (self.mean.delay + 1) * self.mean.nbytes
