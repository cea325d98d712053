"""Why there is no plan: what takes the memory, and how many ranks would do; or what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import prod
from typing import NamedTuple

from mpitrain.errors import ConfigError, MeshError
from mpitrain.placement.bytes import Forecast, Use
from mpitrain.plan.planner.candidates import PLAIN, Candidate, candidates, cuts_of
from mpitrain.plan.planner.problem import Problem
from mpitrain.plan.planner.room import Room
from mpitrain.plan.planner.search import total

MOST = 1 << 16                # ranks that are tried
FEW = 3                       # ways to cut the model that are looked at, of each kind
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def explain(problem: Problem, ranks: int) -> ConfigError | MeshError:
    """The error that says why no way to run on so many ranks was found."""
    config, batch = problem.written, problem.config.train.batch_size
    least = min(frugal(problem, ranks), key=lambda plan: plan.memory, default=None)
    if least is not None and problem.machine.memory_bytes and least.memory > problem.machine.memory_bytes:
        return _too_large(problem, ranks, least)
    fewest = min((c.dp * c.cuts.ep for c in _meshes(problem, ranks)), default=0)
    if fewest > batch:
        return MeshError(f"train.batch_size = {batch} is smaller than the data-parallel ranks: every mesh of {ranks} ranks that "
                         f"this model can be cut for has {fewest} or more; set train.batch_size to {fewest} or more, or give "
                         "fewer --ranks")
    said = [message for message, _ in problem.refused.most_common(1)]
    return config.wrong(f"there is no way to run this on {ranks} ranks that train accepts"
                        + (f"; most often it says: {said[0]}" if said else ""), ())


def _meshes(problem: Problem, ranks: int) -> Iterator[Candidate]:
    """One candidate for each way to cut the model."""
    for cuts in cuts_of(ranks, problem.n_blocks, experts=bool(problem.facts.mixture)):
        if problem.shared(cuts) is not None and problem.traffic(cuts) is not None:
            dp = ranks // prod(cuts)
            yield Candidate(cuts, dp, PLAIN, 1, max(1, problem.config.train.batch_size // (dp * cuts.ep)), "parameters", False)


class Need(NamedTuple):
    """A candidate and the memory of its ranks."""

    candidate: Candidate
    forecast: Forecast

    @property
    def memory(self) -> int:
        """Bytes of the rank that takes most."""
        return max(map(total, self.forecast.stages))


def frugal(problem: Problem, ranks: int, room: Room | None = None) -> Iterator[Need]:
    """The memory of candidates that should take least: of the ways to cut the model that leave least of activations, and of
    those that leave least of parameters, one for each number of micro-batches. What `room` knows not to fit is left out."""
    found = list(_meshes(problem, ranks))
    few = sorted(found, key=lambda c: problem.rows(c) / (c.cuts.cp * c.cuts.tp))[:FEW]
    few += sorted(found, key=lambda c: sum(problem.parameters(c.cuts)) / (c.cuts.pp * c.replicas))[:FEW]
    for cuts in dict.fromkeys(c.cuts for c in few):
        plain = [c for c in candidates(cuts, ranks, problem.config, problem.n_blocks, sequential=problem.sequential)
                 if c.schedule == PLAIN and (c.recompute is True or not problem.sequential)]
        for _, same in groupby(plain, key=lambda c: c.micro_batches):
            for c in reversed(list(same)):                    # the most that can be cut first
                if (room is None or not room.surely_lacks(c)) and problem.allows(c) and problem.cut(c) is not None:
                    yield Need(c, problem.forecast(c))
                    break


def _too_large(problem: Problem, ranks: int, least: Need) -> MeshError:
    machine, limit = problem.machine, problem.machine.memory_bytes
    use = max(least.forecast.stages, key=total)
    needed = smallest(problem, ranks)
    cure = f"{needed} ranks would do" if needed else f"no number of ranks up to {MOST:,} would do"
    return MeshError(f"no mesh of {ranks} rank{'s' if ranks > 1 else ''} holds this model: a rank of {machine.name} has "
                     f"{size(limit)}, and the least is {size(least.memory)} ({shares(use)}) with "
                     f"{' '.join(least.candidate.overrides(problem.written)) or 'the configuration as it is'}; {cure}")


def shares(use: Use) -> str:
    """What takes the memory, the largest first."""
    parts = {name: n for name, n in use._asdict().items() if n and name not in ("pool", "offloaded")}
    return ", ".join(f"{name} {size(n)}" for name, n in sorted(parts.items(), key=lambda item: -item[1]))


def size(nbytes: float) -> str:
    """Bytes in words."""
    unit = 0
    while nbytes >= 1024 and unit < len(UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:.4g} {UNITS[unit]}"


def smallest(problem: Problem, ranks: int) -> int:
    """The smallest number of ranks above `ranks` that hold the model, in whole nodes; 0 where none up to MOST do."""
    node = problem.machine.levels[0].ranks if problem.machine.levels else 0

    room = Room(problem)

    def holds(n: int) -> bool:
        return any(need.memory <= problem.machine.memory_bytes for need in frugal(problem, n, room))

    def step(n: int) -> int:
        return node if node and n >= node else 1
    low, high = ranks, ranks
    while high < MOST and not holds(high):
        low, high = high, min(MOST, 2 * high if not node or high >= node else min(2 * high, node))
    if not holds(high):
        return 0
    while high - low > step(low):
        middle = low + max(step(low), (high - low) // 2 // step(low) * step(low))
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
