"""Ranks that hold copies of the same state compare them while they train, so that no wrong bit is saved or called a result."""

from __future__ import annotations

import math
import socket
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.checkpoint.copies import RATES, Copies, Difference
from mpitrain.checkpoint.kinds import Kept, Values
from mpitrain.checkpoint.state import State
from mpitrain.comm.job import guard
from mpitrain.comm.messages.channel import Channel
from mpitrain.errors import DesyncError, numbered
from mpitrain.train.intervals import Step
from mpitrain.train.observers.observer import Observer, Watched

LEAST = 100                          # steps between comparisons, where nobody says how many
SHARE = 0.0025                       # of the time of these steps, at most, goes into a comparison
OFTEN = ("parameters", "buffers")    # kinds of state that are compared between checkpoints too
APART = (*OFTEN, "optimizer", "workers")      # kinds of which each site has its own
NAMES = {"parameters": "the parameter", "buffers": "the buffer", "optimizer": "the optimizer's state",
         "data": "the transforms' statistics", "mask": "the mask", "rewind": "the value to go back to,",
         "average": "the averaged weight", "outer": "what sites have agreed on,"}


class Agreement(Observer):
    """Compares the state of ranks `every` steps ("auto": rarely enough to cost next to nothing; 0: never), and all of it before
    each checkpoint and when the run is over. Raises DesyncError, on all ranks, where copies differ.

    Sites have states of their own, which the ranks of each compare, until they have met at the end: `OFTEN` is equal then.
    Every rank has one. It should be the last observer, so that a change that another one makes is seen.
    """

    def __init__(self, state: State, channel: Channel, every: int | str = "auto"):
        self.state, self.channel, self.every = state, channel, every
        policy = state.policy
        self._answers = policy is None or not policy.per_node or policy.channel.node is None or policy.channel.node.rank == 0
        self._site = state.mesh.coordinate("site") if state.mesh is not None and state.mesh.n_sites > 1 else None
        self._copies: dict[tuple[bool, tuple[Kept | Values, ...]], Copies] = {}
        self._rates = array("d")                              # of the steps since the last comparison
        self._seconds, self._cost = 0.0, math.inf             # of these steps; of the fastest comparison

    def begin(self, run: Watched) -> None:
        self._agreed = self._agreed_in_all = self._saved = run.step       # steps; training begins from equal bits
        self._next = run.step + (LEAST if self.every == "auto" else int(self.every) or math.inf)

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self._rates.append(fields.lr)
        self._seconds += seconds
        if step >= self._next:
            self._compare(step, OFTEN)

    def before_checkpoint(self, step: int) -> None:
        self._compare(step)

    def after_checkpoint(self, step: int) -> None:
        self._saved = step

    def finish(self, step: int) -> Mapping[str, Any]:
        self._compare(step, met=True)
        return {}

    def _compare(self, step: int, only: Sequence[str] = (), *, met: bool = False) -> None:
        """Compares all kinds of state, or those alone."""
        began = time.perf_counter()
        copies = self._copies_of(step, only, met)
        wait, equal = copies.compare(self._rates, self._interval())
        if not equal:
            with guard.symmetric():
                raise self._error(copies.difference(self._rates, socket.gethostname()), step)
        self._cost = min(self._cost, time.perf_counter() - began)
        self._agreed, self._next = step, step + (wait or math.inf)
        self._agreed_in_all = self._agreed_in_all if only else step
        self._seconds = 0.0
        del self._rates[:]

    def _copies_of(self, step: int, only: Sequence[str], met: bool) -> Copies:
        """The copies of the kinds of state that ranks have alike after `step`."""
        unlike = self.state.policy.unlike(step) if self.state.policy is not None else ()
        kinds = tuple(kind for kind in self.state.kept if kind.steady and (name := kind.prefix.partition("/")[0]) not in unlike
                      and (name in only or not only))
        if (met, kinds) not in self._copies:
            def is_ours(kind: Kept | Values) -> bool:         # the ranks of a node may share parameters, but never buffers
                return self._answers or not kind.prefix.startswith(("parameters", "optimizer/"))

            def among(kind: Kept | Values) -> int | None:
                name = kind.prefix.partition("/")[0]
                return self._site if name in APART and not (met and name in OFTEN) else None
            self._copies[met, kinds] = Copies(kinds, self.channel, is_ours, among)
        return self._copies[met, kinds]

    def _interval(self) -> int:
        """The steps until the next comparison, if this rank is to say it."""
        if self.every != "auto":
            return int(self.every)
        steps = len(self._rates)
        if not steps or not self._seconds or self._cost == math.inf:
            return LEAST
        return max(LEAST, math.ceil(self._cost / (SHARE * self._seconds / steps)))

    def _error(self, found: Difference, step: int) -> DesyncError:
        often = not found.name or found.name.startswith((*OFTEN, RATES))
        agreed = self._agreed if often else self._agreed_in_all
        cure = f"start again with --resume: it goes on from the checkpoint of step {self._saved}" if self._saved else \
            "there is no checkpoint yet, so start anew"
        return DesyncError(f"{said(found, agreed)}; all ranks agreed after step {agreed}, and nothing was saved since; {cure}; "
                           "if it comes again, look for a faulty node, or code of yours that differs between ranks", step=step)


def said(found: Difference, agreed: int) -> str:
    """A difference in words: which rank is in the minority, in which array. All ranks agreed after step `agreed`."""
    if not found.name:
        return "the ranks' digests differed, and no longer did when they were read again: the memory of a node is faulty"
    (kind, _, name), (most, *others) = found.name.partition("/"), found.holders
    fewer = sorted(rank for ranks in others for rank in ranks)
    is_known = len(most) > len(others[0])
    if found.name == RATES:
        return rates_said(found, most, fewer, agreed)
    what = f'{NAMES.get(kind, kind)} "{name}"' + (f" (the first of {found.differing} arrays that differ)" if found.differing > 1
                                                  else "")
    if is_known:
        return f"{_at(fewer, found.hosts)} other bits than {numbered('rank', most)} in {what}"
    return (f"{_at(sorted(most + fewer), found.hosts)} different bits in {what}, and it cannot be told which are right: no "
            "bits are those of most")


def rates_said(found: Difference, most: Sequence[int], fewer: Sequence[int], agreed: int) -> str:
    """The same of the first learning rate that differs."""
    one, other = found.rates[most[0]], found.rates[fewer[0]]
    first = next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)
    return (f"{_at(fewer, found.hosts)} the learning rate {other[first]:.9g}, and {numbered('rank', most)} {one[first]:.9g}, in "
            f"step {agreed + 1 + first}: optimizer.schedule gives ranks different rates")


def _at(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """``rank 1 (node07) has``."""
    where = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
    return f"{numbered('rank', ranks)} ({where}) {'has' if len(ranks) == 1 else 'have'}"
