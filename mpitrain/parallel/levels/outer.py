"""Sites that train by themselves, and meet every H steps: local SGD (Stich, 2019), SlowMo (Wang et al., 2020), DiLoCo (Douillard
et al., 2023), and DiLoCo whose fragments stream (Douillard et al., 2025).

    H steps of each site, from the same start     theta_k
    outer gradient                                d = mean over sites of (start - theta_k)
    outer rule                                    start <- start - lr ... d             a class of OUTER
    the sites go on                               theta_k <- (1 - alpha) theta_k + alpha start

The inner optimizer's state stays with its site. A fragment f of F leaves f H / F steps after the first one, and takes effect
`delay` steps after it left: which one does what is a function of the step alone, so all sites send the same in the same order.
Until step `after`, sites add up their gradients in each step (post-local SGD; Lin et al., 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpitrain.backend import Array
from mpitrain.optim.outer import OuterRule
from mpitrain.parallel.levels.fragments import Fragment
from mpitrain.parallel.levels.gradients import GradientMean
from mpitrain.parallel.levels.level import Level

if TYPE_CHECKING:
    from mpitrain.comm.work import Work
    from mpitrain.parallel.policies.policy import Policy


class Rounds(NamedTuple):
    """When fragments leave and land: `every` steps a round, from step `after` on."""

    every: int
    after: int = 0
    fragments: int = 1
    delay: int = 0

    def leaving(self, step: int) -> int | None:
        """The fragment that leaves after this step, if one does."""
        done = step - self.after
        found = next((f for f in range(self.fragments) if (done - f * self.every // self.fragments) % self.every == 0), None)
        return found if done >= self.every else None

    def landing(self, step: int) -> int | None:
        """The fragment that takes effect after this step."""
        return self.leaving(step - self.delay)

    def under_way(self, step: int) -> int | None:
        """The fragment that has left by this step, and not landed."""
        return next((f for s in range(step - self.delay + 1, step + 1) if (f := self.leaving(s)) is not None), None)

    def round(self, step: int) -> int:
        """How many rounds have ended by this step."""
        return max(0, step - self.after) // self.every

    def met(self, step: int) -> bool:
        """Whether all sites have just taken what they agreed on, and nothing is under way."""
        if step <= self.after:
            return True
        return self.fragments == 1 and self.delay == 0 and (step - self.after) % self.every == 0


class Outer(Level):
    """The meetings of the sites by an outer rule. `fragment_of` gives the number of each parameter's fragment, by name."""

    trains_apart = True

    def __init__(self, policy: Policy, rounds: Rounds, rule: OuterRule, fragment_of: Mapping[str, int], alpha: float = 1.0):
        super().__init__(policy)
        self.rounds, self.rule, self.alpha = rounds, rule, alpha
        trained = [s for s in self.storage.segments if s.parameter.trained_from != float("inf")]
        self.fragment_of = fragment_of
        self.fragments = [Fragment(f, [s for s in trained if fragment_of[s.parameter.key] == f], self.storage)
                          for f in range(rounds.fragments)]
        self.start = self.storage.new_flat()
        self.state = {name: self.storage.new_flat() for name in rule.states}
        for name, first in rule.states.items():
            self.state[name].fill(first)
        self.sent: Array | None = None                        # A sum that is under way, in the storage's layout, for checkpoints.
        self._work: Work | None = None
        self._dense = GradientMean(self.channel, self.storage) if rounds.after else None
        self._waited_s = 0.0
        self._moved = np.zeros(3)                             # This round's sums of squares: own changes, their mean, parameters.
        self._under_way: int | None = None

    @property
    def needs_gradients(self) -> bool:                        # type: ignore[override]
        return self._dense is not None

    def take_start(self, fragments: Sequence[Fragment]) -> None:
        """The round of these fragments begins where the parameters are."""
        for s in (s for fragment in fragments for s in fragment.segments):
            self.start[s.start:s.stop] = self.storage.values[s.start:s.stop]

    def begin(self, step: int) -> None:
        if step == 0:                                         # Parameters may have been read since this was made.
            self.take_start(self.fragments)

    def mix(self, gradients: Any) -> bool:
        if self._dense is None or self.policy.step >= self.rounds.after:
            return True
        return self._dense(gradients)

    def end(self, step: int, lr: float) -> None:
        rounds = self.rounds
        if step <= rounds.after:
            self.meet_running()
            if step == rounds.after:
                self.take_start(self.fragments)
                self._dense = None                            # Its memory is wanted no more.
            return
        self.apart = True
        if rounds.delay and (landing := rounds.landing(step)) is not None:
            self.land(self.fragments[landing], step, lr)
        if (leaving := rounds.leaving(step)) is not None:
            self.leave(self.fragments[leaving])
            if not rounds.delay:
                self.land(self.fragments[leaving], step, lr)
        if (step - rounds.after) % rounds.every == 0:
            self.meet_running()
            self._tell(step)
        self.apart = not self.met(step)

    def met(self, step: int) -> bool:
        """Whether all sites have equal parameters after this step."""
        return self.rounds.met(step) and (self.alpha == 1.0 or step <= self.rounds.after)

    def leave(self, fragment: Fragment) -> None:
        """Begins the sum of the fragment's outer gradients."""
        message, values = fragment.message, self.storage.values
        for s, there in fragment.places:
            message[there] = self.start[s.start:s.stop]
            message[there] -= values[s.start:s.stop]
        self._moved[0] += float(message @ message)
        began = perf_counter()
        self._under_way = fragment.number
        self._work = self.channel.start_allreduce(message, f"outer gradient {fragment.number}") if fragment.size else None
        self._waited_s += perf_counter() - began

    def land(self, fragment: Fragment, step: int, lr: float) -> None:
        """Waits for the sum, and takes the outer step."""
        self._wait_for_work()
        self._under_way = None
        message, values = fragment.message, self.storage.values
        message *= message.dtype.type(1.0 / self.n_sites)
        self._moved[1] += float(message @ message)
        round_ = self.rounds.round(step)
        self.policy.settle()                                  # Nobody writes before all have read.
        for s, there in fragment.places:
            own = slice(s.start, s.stop)
            start = self.start[own]
            self.rule.change(start, message[there], [flat[own] for flat in self.state.values()], round=round_, inner_lr=lr)
            self._moved[2] += float(start @ start)
            if self.alpha == 1.0:
                values[own][...] = start
            else:
                values[own][...] += values.dtype.type(self.alpha) * (start - values[own])
        self.policy.publish()

    def _wait_for_work(self) -> None:
        began = perf_counter()
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._waited_s += perf_counter() - began

    def _tell(self, step: int) -> None:
        """What the round was like, over all ranks: `drift` is the rms distance of the sites from their mean before they met, over
        the rms of the parameters. The seconds of waiting are of the rank that waited least, as those for gradients."""
        control = self.policy.context.control
        message = np.zeros(3 + control.size)
        message[:3], message[3 + control.rank] = self._moved, self._waited_s
        control.allreduce(message, name="how far sites were apart")
        changed, mean, size = message[:3]
        self.fields = {"round": self.rounds.round(step), "drift": sqrt(max(changed - mean, 0.0) / size) if size else 0.0,
                       "sync_exposed_s": float(message[3:].min())}
        self._moved[:], self._waited_s = 0.0, 0.0

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        self._wait_for_work()
        if self._under_way is not None:
            self.fragments[self._under_way].unpack(self._sent())

    def _sent(self) -> Array:
        if self.sent is None:
            self.sent = self.storage.new_flat()
        return self.sent

    def states(self) -> Mapping[str, Array]:
        sent = {} if self._under_way is None else {"sent": self._sent()}
        return {"start": self.start, **self.state, **sent}

    def passing(self) -> Sequence[str]:
        return ("sent",) if self.rounds.delay else ()

    def has(self, name: str, parameter: str) -> bool:
        return name != "sent" or self.fragment_of.get(parameter) == self._under_way

    def resume(self, step: int) -> None:
        self._under_way = self.rounds.under_way(step)
        self.apart = not self.met(step)
        if step >= self.rounds.after:
            self._dense = None

    def restored(self) -> None:
        if self._under_way is not None:
            self.fragments[self._under_way].pack(self._sent())
