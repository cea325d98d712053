"""Two things timed alternately in one run, and what the pairs say: a shared machine changes its speed between two runs."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpitrain.comm.job.start import World
from mpitrain.errors import ConfigError

WARM_UP = 2                       # The first pairs are checked but not counted: first touches, compilation, connections.


class Unavailable(ConfigError):
    """What was to be measured cannot be had on these ranks; raised on all of them alike, so it can be left out."""


class Clock:
    """Times what all ranks of `world` do together: from the moment all are there until the last one has done its part."""

    def __init__(self, world: World):
        self._comm = world.comm
        self._mine, self._all = np.zeros(1), np.zeros(world.size)

    def time(self, run: Callable[[], Any]) -> float:
        """Seconds of the slowest rank; every rank gets the same number."""
        self._comm.Barrier()
        began = time.perf_counter()
        run()
        self._mine[0] = time.perf_counter() - began
        self._comm.Allgather(self._mine, self._all)
        return float(self._all.max())


@dataclass(frozen=True)
class Pairs:
    """Seconds of the two members of each pair."""

    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """How many times faster ours is, pair by pair."""
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    def summary(self, theirs: str = "mpi") -> dict[str, float]:
        """Medians, and their quartiles as `_low` and `_high`; the ratio is the median of ratios, not the ratio of medians."""
        found: dict[str, float] = {}
        spread: dict[str, float] = {}
        for name, values in (("seconds", self.ours), (f"{theirs}_seconds", self.theirs), ("ratio", self.ratios)):
            found[name] = statistics.median(values)
            spread[f"{name}_low"], spread[f"{name}_high"] = quartiles(values)
        return {**found, **spread, "pairs": len(self.ours)}


def alternate(ours: Callable[[int], float], theirs: Callable[[int], float], pairs: int) -> Pairs:
    """Runs A B A B ...; each gets the number of its turn, never the same twice, and returns its seconds."""
    return Pairs(*in_turn([ours, theirs], pairs))


def timed(run: Callable[[], Any], calls: int) -> Callable[[int], float]:
    """A member for `in_turn`: gives the seconds of one call, out of `calls`, in this process."""
    def turn(_: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - began) / calls
    return turn


def in_turn(members: Sequence[Callable[[int], float]], rounds: int) -> list[list[float]]:
    """Runs A B C A B C ..., as `alternate` does two; the seconds of each member."""
    times: list[list[float]] = [[] for _ in members]
    collecting = gc.isenabled()
    gc.disable()                                     # A collection inside one member would be charged to it alone.
    try:
        for turn in range(len(members) * (WARM_UP + rounds)):
            which = turn % len(members)
            times[which].append(members[which](turn))
    finally:
        if collecting:
            gc.enable()
    return [seconds[WARM_UP:] for seconds in times]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The values a quarter and three quarters of the way up."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
