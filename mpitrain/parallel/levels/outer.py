"""Sites that train by themselves, and meet every H steps: local SGD (Stich, 2019), SlowMo (Wang et al., 2020), DiLoCo (Douillard
et al., 2023), and DiLoCo whose fragments stream (Douillard et al., 2025).

    H steps of each site, from the same start     theta_k
    outer gradient                                d = mean over sites of (start - theta_k)
    outer rule                                    start <- start - lr ... d             a class of OUTER
    the sites go on                               theta_k <- (1 - alpha) theta_k + alpha start

The inner optimizer's state stays with its site. `Rounds` says which fragment leaves and lands when, by the step alone, so all
sites send the same in the same order. Until step `after`, sites add up their gradients in each step (post-local SGD; Lin et al.,
2020).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import sqrt
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpitrain.backend import Array
from mpitrain.optim.outer import OuterRule
from mpitrain.parallel.levels.fragments import Fragment
from mpitrain.parallel.levels.gradients import GradientMean
from mpitrain.parallel.levels.level import Level, Parts
from mpitrain.parallel.levels.rounds import Rounds

if TYPE_CHECKING:
    from mpitrain.comm.work import Work
    from mpitrain.parallel.policies.policy import Policy


SAMPLE = 1 << 16                                              # changes of a fragment that `drift` looks at


def _told(fragments: Sequence[int]) -> str:
    if len(fragments) < 2:
        return f"fragment {fragments[0]} was" if fragments else "no fragment was"
    return f"fragments {', '.join(map(str, fragments))} were"


def stride(size: int) -> int:
    """Every so many elements, `SAMPLE` or a few more are looked at."""
    return max(1, size // SAMPLE)


class Outer(Level):
    """The meetings of the sites by an outer rule.

    `fragment_of` gives the number of each parameter's fragment, by name. `code`, where given, makes the compressed sums.
    """

    trains_apart = True

    def __init__(self, policy: Policy, rounds: Rounds, rule: OuterRule, fragment_of: Mapping[str, int], alpha: float = 1.0,
                 code: Callable[[Level, Sequence[Fragment]], Any] | None = None):
        super().__init__(policy)
        self.rounds, self.rule, self.alpha, self.fragment_of = rounds, rule, alpha, fragment_of
        self.fragments = [Fragment(f, [s for s in self.trained if fragment_of[s.parameter.key] == f], self.storage)
                          for f in range(rounds.fragments)]
        self.start = self.storage.new_flat()
        self.state = {name: self.storage.new_flat() for name in rule.states}
        for name, first in rule.states.items():
            self.state[name].fill(first)
        self.coded = None if code is None else code(self, self.fragments)
        self._works: dict[int, Work | None] = {}              # The sums under way, by fragment; None: it is there.
        self._dense = GradientMean(self) if rounds.after else None
        self._waited_s, self._largest, self._since, self._told = 0.0, 0, 0, 0
        self._squares = np.zeros(2)                           # This round's sums: distance from the mean, and the parameters'.
        self._changes: dict[int, Array] = {}                  # Some of the changes that left, by fragment.

    @property
    def needs_gradients(self) -> bool:                        # type: ignore[override]
        return self._dense is not None

    def begin(self, step: int) -> None:
        if step == 0:                                         # Parameters may have been read since this was made.
            self.take_start()

    def take_start(self) -> None:
        """A round begins where the parameters are."""
        for fragment in self.fragments:
            for s in fragment.segments:
                self.start[s.start:s.stop] = self.storage.values[s.start:s.stop]

    def mix(self, gradients: Any) -> bool:
        if self._dense is None or self.policy.step >= self.rounds.after:
            return True
        return self._dense(gradients)

    def end(self, step: int, lr: float) -> None:
        rounds = self.rounds
        if step <= rounds.after:
            self.meet_running()
            if step == rounds.after:
                self.take_start()
                self._dense, self._since = None, step         # Its memory is wanted no more.
            return
        for f in rounds.landing(step):
            if f in self._works:                              # A run that now goes on had landed all with its last step.
                self.land(self.fragments[f], step, lr)
        leaving = rounds.leaving(step)
        for f in leaving:
            self.leave(self.fragments[f])
        for f in leaving if not rounds.delay or rounds.ends(step) else ():
            self.land(self.fragments[f], step, lr)
        if rounds.ended(step):
            self.meet_running()
            self._tell(step)
        self.apart = not (rounds.met(step) and (self.alpha == 1.0 or rounds.ends(step)))

    def leave(self, fragment: Fragment) -> None:
        """Begins the sum of the fragment's outer gradients."""
        message, values = fragment.message, self.storage.values
        for s, there in fragment.places:
            message[there] = self.start[s.start:s.stop]
            message[there] -= values[s.start:s.stop]
        self._changes[fragment.number] = message[::stride(fragment.size)].copy()
        began = perf_counter()
        work, sent = None, 0
        if fragment.size and self.coded is not None:
            work, sent = self.coded.start(fragment), self.coded.sent(fragment)
        elif fragment.size:
            work, sent = self.channel.start_allreduce(message, f"outer gradient {fragment.number}"), self.posted(fragment.size)
        self._works[fragment.number] = work
        self.count(sent)
        self._largest = max(self._largest, sent)
        self._waited_s += perf_counter() - began

    def land(self, fragment: Fragment, step: int, lr: float) -> None:
        """Waits for the sum, and takes the outer step."""
        self._wait_for(self._works.pop(fragment.number))
        message, values = fragment.message, self.storage.values
        message *= message.dtype.type(1.0 / self.n_sites)
        by = stride(fragment.size)
        if (own_change := self._changes.pop(fragment.number, None)) is not None:       # None: before a checkpoint.
            own_change -= message[::by]
            self._squares[0] += by * float(own_change @ own_change)
        alpha = 1.0 if self.rounds.ends(step) else self.alpha
        self.policy.settle()                                  # Nobody writes before all have read.
        for s, there in fragment.places:
            own = slice(s.start, s.stop)
            start = self.start[own]
            self.rule.change(start, message[there], [flat[own] for flat in self.state.values()],
                             round=self.rounds.round(step), inner_lr=lr)
            self._squares[1] += float(start @ start)
        for part in self.policy.own():                        # Ranks that share one copy write a part of it each.
            if self.fragment_of.get(part.parameter.key) != fragment.number:
                continue
            start, now = self.start[part.start:part.stop], values[part.start:part.stop]
            if alpha == 1.0:
                now[...] = start
            else:
                now += now.dtype.type(alpha) * (start - now)
        self.policy.publish()

    def _wait_for(self, work: Work | None) -> None:
        began = perf_counter()
        if work is not None:
            work.wait()
        self._waited_s += perf_counter() - began

    def _tell(self, step: int) -> None:
        """What the round was like, over all ranks: `drift` is the rms distance of the sites from their mean before they met, over
        the rms of the parameters. The seconds of waiting are of the rank that waited least, as those for gradients; the bytes of
        the one that sent most, a step and at once."""
        control = self.policy.context.control
        message = np.zeros(2 + 3 * control.size)
        message[:2] = self._squares
        message[2 + control.rank::control.size] = self._waited_s, self.sent_bytes - self._told, self._largest
        control.allreduce(message, name="how far sites were apart")
        (apart, size), (waited, sent, largest) = message[:2], message[2:].reshape(3, -1)
        self.fields = {"round": self.rounds.round(step), "drift": sqrt(apart / size) if size else 0.0,
                       "sync_exposed_s": float(waited.min()), "wire_bytes": float(sent.max()) / max(1, step - self._since),
                       "wire_largest_bytes": float(largest.max())}
        self._squares[:], self._waited_s, self._told, self._since = 0.0, 0.0, self.sent_bytes, step

    # -- checkpoints -----------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        for f, work in self._works.items():
            self._wait_for(work)
            self._works[f] = None

    def states(self) -> Mapping[str, Parts]:
        sent = [part for f in self._works for part in self.fragments[f].parts(self.fragments[f].message)]
        return {"start": self.parts(self.start), **{name: self.parts(flat) for name, flat in self.state.items()},
                **({"sent": sent} if self._works else {})}

    def own_states(self) -> Mapping[str, Parts]:
        return {} if self.coded is None else self.coded.own_states()

    def owned_states(self) -> Mapping[str, Parts]:
        return {} if self.coded is None else self.coded.owned_states()

    def passing(self) -> Sequence[str]:
        return ("sent",) if self.rounds.delay else ()

    def resume(self, step: int, apart: bool, there: Mapping[str, Collection[str]]) -> str:
        self.apart = apart
        found = sorted({self.fragment_of[name] for name in there.get("sent", ()) if name in self.fragment_of})
        expected = self.rounds.under_way(step)
        if found != expected and (found or apart):            # Where sites have met, nothing is under way.
            return (f"{_told(found)} under way, and by this run's every, fragments and delay {_told(expected)} after step "
                    f"{step}; set these as they were, or go on from the end of a run")
        self._works = dict.fromkeys(found)
        self._since = step
        if step >= self.rounds.after:
            self._dense = None
        return ""

    @property
    def nbytes(self) -> int:
        own: int = self.start.nbytes * (1 + len(self.state)) + sum(fragment.message.nbytes for fragment in self.fragments)
        return own + (0 if self._dense is None else self._dense.nbytes) + (0 if self.coded is None else self.coded.nbytes)
