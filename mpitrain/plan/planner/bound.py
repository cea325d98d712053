"""Seconds that no step of a candidate is below, from sums of its blocks alone: what `search` orders candidates by.

    before stage s begins, a micro-batch passes the stages before it, and after its last backward one passes them back;
    between, it does its own work for all micro-batches                                           -> compute and idle time
    the gradients of stage 0, as one message, leave after its last backward has begun             -> exposed exchange

Left out are the collectives of layers, messages between stages, latencies of further buckets and the stragglers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from mpitrain.placement.stages import find_bounds
from mpitrain.plan.planner.candidates import Candidate
from mpitrain.plan.planner.problem import SPLIT, Problem
from mpitrain.plan.planner.work import wire_factor
from mpitrain.schedules.grid import AXES, REPLICAS
from mpitrain.schedules.level_times import level_seconds
from mpitrain.schedules.step_simulate import group


def bound(problem: Problem, c: Candidate) -> float:
    """Seconds of a step of the candidate at least."""
    pipeline, last, update = problem.once(("pipeline", problem.rows(c), c.cuts, c.chunks, c.micro_batches, c.schedule in SPLIT,
                                           c.recompute, c.dp), lambda: _pipeline(problem, c))
    exchange: float = problem.once(("exchange", c.cuts, c.chunks, c.dp, c.sharding), lambda: _exchange(problem, c))
    hidden = last * problem.machine.overlap
    return float(pipeline + max(0.0, exchange - hidden) + update / (c.replicas if c.sharding != "none" else 1))


def _pipeline(problem: Problem, c: Candidate) -> tuple[float, float, float]:
    """(compute and idle seconds, those of stage 0's last backward, the update with all of its parameters)."""
    blocks, pp = problem.blocks(c), c.cuts.pp
    bounds = find_bounds(problem.n_blocks, pp, c.chunks, ()) if pp * c.chunks > 1 else [0, problem.n_blocks]
    forward = _sums(blocks.forward, bounds)
    backward = _sums(blocks.backward, bounds)
    again = forward if c.recompute is True else [0.0] * len(forward)
    inputs = [b * (0.5 if c.schedule in SPLIT else 1.0) + a for b, a in zip(backward, again)]
    work = [sum(f + b + a for f, b, a in zip(forward[s::pp], backward[s::pp], again[s::pp])) for s in range(pp)]
    before = [0.0, *accumulate(f + b for f, b in zip(forward[:pp], inputs[:pp]))]
    seconds = max(c.micro_batches * work[s] + before[s] for s in range(pp))
    update = max(sum(_sums(blocks.update, bounds)[s::pp]) for s in range(pp))
    return seconds, sum(backward[::pp]) + sum(again[::pp]), update


def _exchange(problem: Problem, c: Candidate) -> float:
    """Seconds of the exchange of stage 0's gradients, and of its parameters where they follow the update. No less is hidden than
    a bucket's last part."""
    lengths, pp = tuple(c.mesh.get(axis, 1) for axis in AXES), c.cuts.pp
    n, stride = group(lengths, REPLICAS)
    if n == 1 or c.cuts.ep > 1:
        return 0.0
    bounds = find_bounds(problem.n_blocks, pp, c.chunks, ()) if pp * c.chunks > 1 else [0, problem.n_blocks]
    nbytes = sum(_sums(problem.parameters(c.cuts), bounds)[::pp]) * wire_factor(problem.config)
    if c.sharding == "none":
        return level_seconds("all_reduce", n, stride, nbytes, problem.machine.levels)
    return level_seconds("reduce_scatter", n, stride, nbytes, problem.machine.levels)


def _sums(costs: Sequence[float], bounds: Sequence[int]) -> list[float]:
    return [sum(costs[a:b]) for a, b in zip(bounds, bounds[1:])]
