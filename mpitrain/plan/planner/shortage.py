"""Why there is no plan: what takes the memory, and how many ranks would do; or what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from mpitrain.errors import ConfigError, MeshError
from mpitrain.placement.bytes import Use
from mpitrain.plan.planner.candidates import Candidate, candidates, cuts_of
from mpitrain.plan.planner.problem import Problem
from mpitrain.plan.planner.search import Plan, total

MOST = 1 << 16                # ranks that are tried
GIB = 2**30


def explain(problem: Problem, ranks: int) -> ConfigError | MeshError:
    """The error that says why no way to run on so many ranks was found."""
    config, batch = problem.written, problem.config.train.batch_size
    least = min((plan for plan in frugal(problem, ranks)), key=lambda plan: plan.memory, default=None)
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
    for cuts in cuts_of(ranks, problem.n_blocks, experts=bool(problem.facts.mixture)):
        if problem.shared(cuts) is not None:
            yield Candidate(cuts, ranks // prod(cuts), "1f1b", 1, 1, "none", False)


def frugal(problem: Problem, ranks: int) -> Iterator[Plan]:
    """For each way to cut the model the one that should take least memory, with no time; only those that a run allows."""
    for cuts in cuts_of(ranks, problem.n_blocks, experts=bool(problem.facts.mixture)):
        if problem.shared(cuts) is None:
            continue
        found = [c for c in candidates(cuts, ranks, problem.config, problem.n_blocks, sequential=problem.sequential)
                 if c.chunks == 1 and c.schedule == "1f1b" and (c.recompute is True or not problem.sequential)]
        most = max((c.micro_batches for c in found), default=0)
        for c in reversed([c for c in found if c.micro_batches == most]):
            if problem.allows(c) and problem.cut(c) is not None:
                yield Plan(c, None, problem.forecast(c))                     # type: ignore[arg-type]
                break


def _too_large(problem: Problem, ranks: int, least: Plan) -> MeshError:
    machine, limit = problem.machine, problem.machine.memory_bytes
    use = max(least.forecast.stages, key=total)
    needed = smallest(problem, ranks)
    cure = f"{needed} ranks would do" if needed else f"no number of ranks up to {MOST:,} would do"
    return MeshError(f"no mesh of {ranks} rank{'s' if ranks > 1 else ''} holds this model: a rank of {machine.name} has "
                     f"{limit / GIB:.2f} GiB, and the least is {least.memory / GIB:.2f} GiB ({shares(use)}) with "
                     f"{' '.join(least.candidate.overrides(problem.written)) or 'the configuration as it is'}; {cure}")


def shares(use: Use) -> str:
    """What takes the memory, the largest first."""
    parts = {name: n for name, n in use._asdict().items() if n and name not in ("pool", "offloaded")}
    return ", ".join(f"{name} {n / GIB:.2f}" for name, n in sorted(parts.items(), key=lambda item: -item[1]))


def smallest(problem: Problem, ranks: int) -> int:
    """The smallest number of ranks above `ranks` that hold the model, in whole nodes; 0 where none up to MOST do."""
    node = problem.machine.levels[0].ranks if problem.machine.levels else 0

    def holds(n: int) -> bool:
        return any(plan.memory <= problem.machine.memory_bytes for plan in frugal(problem, n))

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
