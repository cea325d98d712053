"""Seconds of each phase of a step, and the joules of each: slow samples of one counter, shared out by least squares.

    seconds of phase p in the interval between two samples k     A[k, p], added up over the ranks of the host
    joules in that interval                                      b[k]
    watts of phase p                                             x[p] >= 0 that makes the sum of squares of A x - b least

A phase of some milliseconds has few steps of the counter, so readings at its ends would be wrong as well as dear. Over
many intervals of 50 ms, in which phases have different shares, the powers can be told apart: in a simulation whose counter moves
once a millisecond, energies of phases of 3 to 24 ms came out within 0.1 %, from differences at their ends within 20 %.
What a counter shows is half a step old on average (`lag`), and phases follow each other in one order, so the seconds are those of
that moment: without it a recorded minute had forward 1 % too low. Only the normal equations are kept, so a long run takes no
memory. Non-negative least squares are Lawson and Hanson's (Solving Least Squares Problems, 1974, chapter 23).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

PHASES = ("forward", "backward", "wait_for_gradients", "update", "data", "evaluation", "checkpoint", "idle", "other")
"""`idle`: waiting for other ranks, for stages of a pipeline or the sum of a loss; `other`: outside of all spans."""
ROWS = {"data": "data", "evaluation": "evaluation", "checkpoint": "checkpoint", "wait": "idle", "step": "other"}
NAMES = {"forward": "forward", "backward": "backward", "weight": "backward", "gradients": "wait_for_gradients",
         "exchange": "idle"}                      # the first word of a span of the row "compute"
STARTED, PLACE, BEGAN, LAST, FIRST = range(5)     # words of a rank: its start, its phase, since when, the one before; seconds
WORDS = FIRST + len(PHASES)
AT_ONCE = 256                                     # intervals that are added up together
NOTHING = nullcontext()


class PhaseClock:
    """Seconds of this rank by phase, in `words` (`WORDS` float64 numbers), which other ranks of the host may see.

    `span` is a `SpanMaker`: two readings of the clock for each span. What is inside of another span is not counted twice.
    Spans on rows of other threads are none of ours.
    """

    def __init__(self, words: Any = None, clock: Callable[[], float] = perf_counter):
        self.words: Any = memoryview(bytearray(8 * WORDS)).cast("d") if words is None else words
        self.clock, self.place, self.began = clock, FIRST + PHASES.index("other"), 0.0
        self.outer: list[int] = []                            # the places of the spans around the present one
        self._spans = {phase: Span(self, FIRST + i) for i, phase in enumerate(PHASES)}
        self._rows = {row: self._spans[phase] for row, phase in ROWS.items()}
        self._names: dict[str, Span] = {}

    def start(self) -> None:
        self.began = self.clock()
        self.words[PLACE] = self.words[LAST] = self.place
        self.words[BEGAN] = self.began
        self.words[STARTED] = self.began                      # last: a rank that has not started is not counted

    def span(self, row: str, name: str) -> AbstractContextManager[None]:
        if row != "compute":
            return self._rows.get(row, NOTHING)
        span = self._names.get(name)
        if span is None:
            span = self._names[name] = self._spans[NAMES.get(name.partition(" ")[0], "other")]
        return span

    def landed(self) -> None:
        """All gradients of the step are here: what waited for them updates parameters now."""
        if self.place == FIRST + PHASES.index("wait_for_gradients"):
            self.turn(FIRST + PHASES.index("update"))

    def turn(self, place: int) -> None:
        """Another phase begins at this moment."""
        words, now = self.words, self.clock()
        words[self.place] += now - self.began
        words[LAST] = self.place
        words[BEGAN] = self.began = now
        words[PLACE] = self.place = place

    def detach(self) -> None:
        """Gives up the shared words, which may go; nobody asks for the seconds from here on."""
        self.words = memoryview(bytearray(8 * WORDS)).cast("d")


class Span:
    """The context of one phase; it is entered again and again, also within itself."""

    __slots__ = ("clock", "place")

    def __init__(self, clock: PhaseClock, place: int):
        self.clock, self.place = clock, place

    def __enter__(self) -> None:
        clock = self.clock
        clock.outer.append(clock.place)
        clock.turn(self.place)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.clock.turn(self.clock.outer.pop())


def seconds_of(words: Any, now: float, lag: float = 0.0) -> list[float] | None:
    """The seconds of each phase of one rank until `lag` before `now`, the present phase included; None in the very moment in
    which the rank changes its phase. Their sum is the time since the rank started, which tells."""
    started, place, began, last = words[STARTED], int(words[PLACE]), words[BEGAN], int(words[LAST])
    found = list(words[FIRST:WORDS])
    if not started:
        return [0.0] * len(PHASES)
    found[place - FIRST] += now - began
    if abs(sum(found) - (now - started)) > 1e-6 + 1e-9 * (now - started):
        return None
    present = min(lag, now - began)                           # the rest of the lag was in the phase before
    found[place - FIRST] -= present
    found[last - FIRST] -= lag - present
    return found


def seconds_of_all(ranks: Sequence[Any], clock: Callable[[], float] = perf_counter, lag: float = 0.0) -> list[float] | None:
    """The same added up over ranks of one host, whose clock is one, until `lag` before now."""
    total = [0.0] * len(PHASES)
    for words in ranks:
        found = next((found for _ in range(3) if (found := seconds_of(words, clock(), lag)) is not None), None)
        if found is None:
            return None
        total = [a + b for a, b in zip(total, found)]
    return total


class Solved(NamedTuple):
    """Watts of each phase and their standard errors, (n,) each, and the residual as a share: the root of the sum of squares of
    A x - b, over that of b."""

    watts: np.ndarray[Any, Any]
    errors: np.ndarray[Any, Any]
    residual: float


class PowerFit:
    """The normal equations of joules over seconds of n phases."""

    def __init__(self, n: int):
        self.n, self.rows = n, 0
        self._gram, self._right, self._square = np.zeros((n, n)), np.zeros(n), 0.0       # A' A, A' b, b' b
        self._seconds, self._joules = np.zeros(n), 0.0        # sums of A's columns, and of b
        self._waiting: list[list[float]] = []

    def add(self, seconds: Sequence[float], joules: float) -> None:
        """One interval."""
        self._waiting.append([*seconds, joules])
        if len(self._waiting) >= AT_ONCE:
            self._add_up()

    def _add_up(self) -> None:
        if self._waiting:
            table = np.array(self._waiting)
            seconds, joules = table[:, :-1], table[:, -1]
            self._gram += seconds.T @ seconds
            self._right += seconds.T @ joules
            self._square += float(joules @ joules)
            self._seconds += seconds.sum(axis=0)
            self._joules += float(joules.sum())
            self.rows += len(table)
            self._waiting.clear()

    def solve(self) -> Solved:
        """The watts that fit best. Beside the intervals stands what is known before: the watts of a phase are those of the mean,
        give or take as much. It counts for nothing where the intervals tell phases apart, and where they do not, as in steps of
        a millisecond that are all alike, the phases get the mean, and an error as large."""
        self._add_up()
        rows = max(1.0, float(self.rows))
        total = float(self._seconds.sum())
        mean = self._joules / total if total > 0 else 0.0
        plain = non_negative(self._gram, self._right)
        variance = max(self._left(plain) / max(1.0, rows - np.count_nonzero(plain)), 1e-12 * self._square / rows)
        if not mean or not variance:
            return Solved(np.zeros(self.n), np.zeros(self.n), 0.0)
        weight = variance / mean ** 2
        gram = self._gram + weight * np.eye(self.n)
        watts = non_negative(gram, self._right + weight * mean)
        errors = np.sqrt(np.diag(np.linalg.inv(gram)) * variance)
        return Solved(watts, errors, math.sqrt(self._left(watts) / self._square))

    def _left(self, watts: np.ndarray[Any, Any]) -> float:
        """The sum of squares of A x - b."""
        return max(0.0, self._square - 2 * float(watts @ self._right) + float(watts @ self._gram @ watts))


def non_negative(gram: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The x >= 0 that makes x' G x - 2 x' r least, for G = A' A (n, n) and r = A' b (n,): Lawson and Hanson's active sets."""
    n = len(right)
    scale = np.sqrt(np.where(np.diag(gram) > 0, np.diag(gram), 1.0))       # columns of length 1: phases differ by 1,000 times
    gram, right = gram / np.outer(scale, scale), right / scale
    x, inside = np.zeros(n), np.zeros(n, bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(right).max(initial=0.0)))
    for _ in range(3 * n):
        slope = right - gram @ x
        candidates = ~inside & (slope > tolerance)
        if not candidates.any():
            break
        inside[int(np.argmax(np.where(candidates, slope, -np.inf)))] = True
        while True:
            trial = np.zeros(n)
            places = np.flatnonzero(inside)
            trial[places] = np.linalg.lstsq(gram[np.ix_(places, places)], right[places], rcond=None)[0]
            if not len(places) or trial[places].min() > 0:
                break
            falling = places[trial[places] <= 0]
            step = float(np.min(x[falling] / np.maximum(x[falling] - trial[falling], 1e-300)))
            x = x + step * (trial - x)
            inside &= x > tolerance * 1e-3
            x[~inside] = 0.0
        x = trial
    return x / scale
