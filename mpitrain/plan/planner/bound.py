"""Seconds that no step of a candidate is below: what `search` orders candidates by.

    before stage s begins, a micro-batch passes the stages before it, and after its last backward one passes them back;
    between, it does its own work for all micro-batches                                    -> compute and idle time
    the gradients of stage 0 leave after its last backward has begun                       -> exposed exchange
    sharded parameters come back after the update, or ahead of each use

`rough` knows sums of the blocks' seconds alone; `near` adds the collectives of layers, for which a few rows have to run through
the model, and those of sharded states in each micro-batch. Left out are messages between stages, latencies of all-reduces
of further buckets, and the stragglers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from mpitrain.placement.stages import find_bounds
from mpitrain.plan.planner.candidates import Candidate
from mpitrain.plan.planner.problem import SPLIT, Problem
from mpitrain.plan.planner.traffic import sized
from mpitrain.plan.planner.work import algorithm_of, timed, width_factor, wire_factor
from mpitrain.schedules.grid import AXES, REPLICAS
from mpitrain.schedules.level_times import level_seconds, stream_seconds
from mpitrain.schedules.step_simulate import Collective, group

ITEM = 4                      # bytes of a gradient
NOTHING = 1e-9                # bytes of a message that is all latency


class Layers(NamedTuple):
    """Seconds of the collectives of each block, forward and backward, and of what goes round a ring meanwhile."""

    forward: list[float]
    backward: list[float]
    ring_forward: list[float]
    ring_backward: list[float]


class Least(NamedTuple):
    """Seconds of the pipeline, of stage 0's last backward, and of the update with all of its parameters."""

    pipeline: float
    last: float
    update: float


def rough(problem: Problem, c: Candidate) -> float:
    """Seconds of a step of the candidate at least."""
    nothing = [0.0] * problem.n_blocks
    key = "rough", problem.rows(c), c.cuts, c.chunks, c.micro_batches, c.schedule in SPLIT, c.recompute, c.dp
    return _bound(problem, c, problem.once(key, lambda: _least(problem, c, Layers(nothing, nothing, nothing, nothing))))


def near(problem: Problem, c: Candidate) -> float:
    """The same, with the collectives of layers, and of sharded states."""
    key = ("near", problem.rows(c), c.cuts, c.chunks, c.micro_batches, c.schedule in SPLIT, c.recompute, c.dp,
           problem.by_messages(c))
    fetched: float = problem.once(("fetched", problem.rows(c), c.cuts, c.chunks, c.micro_batches, c.recompute, c.dp, c.sharding),
                                  lambda: _fetched(problem, c))
    return _bound(problem, c, problem.once(key, lambda: _least(problem, c, _layers(problem, c))), fetched)


def _bound(problem: Problem, c: Candidate, least: Least, fetched: float = 0.0) -> float:
    """Seconds of a step at least, each of whose micro-batches waits for `fetched` seconds of sharded states, the last one in
    that backward, perhaps."""
    exchange, after = problem.once(("exchange", c.cuts, c.chunks, c.dp, c.sharding), lambda: _exchange(problem, c))
    shown = max(exchange - least.last - fetched, (1 - problem.machine.overlap) * exchange)    # if it begins with that backward
    update = least.update / (c.replicas if c.sharding != "none" else 1)
    return float(least.pipeline + c.micro_batches * fetched + shown + after + update)


def _least(problem: Problem, c: Candidate, layers: Layers) -> Least:
    blocks, pp, bounds, overlap = problem.blocks(c), c.cuts.pp, bounds_of(problem, c), problem.machine.overlap
    forward, backward = sums(blocks.forward, bounds), sums(blocks.backward, bounds)
    again = forward if c.recompute is True else [0.0] * len(forward)
    in_forward = _waited(sums(layers.forward, bounds), sums(layers.ring_forward, bounds), forward, overlap)
    in_backward = _waited(sums(layers.backward, bounds), sums(layers.ring_backward, bounds),
                          [b + a for b, a in zip(backward, again)], overlap)
    half = 0.5 if c.schedule in SPLIT else 1.0
    ahead = [f + t for f, t in zip(forward, in_forward)]
    back = [b * half + a + t for b, a, t in zip(backward, again, in_backward)]
    whole = [f + b + a + t for f, b, a, t in zip(ahead, backward, again, in_backward)]
    there, home = [0.0, *accumulate(ahead[:pp])], [0.0, *accumulate(back[:pp])]
    seconds = max(there[s] + c.micro_batches * sum(whole[s::pp]) + (home[s] if half == 1 else 0.0) for s in range(pp))
    if half < 1:                             # weight gradients are left for the time in which the last gradient goes home
        own = [f + b for f, b in zip(ahead, back)]
        seconds = max(seconds, *(there[s] + c.micro_batches * sum(own[s::pp]) + home[s] for s in range(pp)))
    update = max(sum(sums(blocks.update, bounds)[s::pp]) for s in range(pp))
    return Least(seconds, sum(back[::pp]) + (1 - half) * sum(backward[::pp]), update)


def _waited(waits: Sequence[float], ring: Sequence[float], compute: Sequence[float], overlap: float) -> list[float]:
    return [w + max(0.0, r - overlap * seconds) for w, r, seconds in zip(waits, ring, compute)]


def _layers(problem: Problem, c: Candidate) -> Layers:
    """The collectives of layers for one micro-batch, each as a step times it."""
    lengths, size = tuple(c.mesh.get(axis, 1) for axis in AXES), width_factor(problem) * problem.rows(c)
    machine, algorithm = problem.machine_of(c), algorithm_of(problem.config)

    def seconds(collectives: Iterable[Collective]) -> float:
        total = 0.0
        for one in timed(problem, c, sized(tuple(collectives), size)):
            n, stride = group(lengths, one.axes)
            lasts = level_seconds(one.operation, n, stride, one.nbytes, machine.levels, algorithm) \
                if one.seconds is None else one.seconds
            total += one.count * (lasts + machine.collective_s)
        return total
    heard = problem.traffic(c.cuts)
    assert heard is not None, "it has been found to be there"
    found: Layers = problem.once(("layers", c.cuts[1:], lengths, problem.rows(c), problem.by_messages(c)), lambda: Layers(
        *([seconds(getattr(block, way)) for block in heard] for way in Layers._fields)))
    return found


def _exchange(problem: Problem, c: Candidate) -> tuple[float, float]:
    """Seconds of the exchange of stage 0's gradients, and of the gather after the update of the stage that has most."""
    parameters, pp, wire = sums(problem.parameters(c.cuts), bounds_of(problem, c)), c.cuts.pp, wire_factor(problem.config)
    counts = buckets_of(problem, c)
    most = max(sum(parameters[s::pp]) for s in range(pp)) if c.sharding in ("optimizer", "gradients") else 0.0
    return (_among_replicas(problem, c, "all_reduce" if c.sharding == "none" else "reduce_scatter", sum(parameters[::pp]) * wire,
                            sum(counts[::pp])),
            _among_replicas(problem, c, "all_gather", most * wire, min(sum(counts[s::pp]) for s in range(pp))))


def _fetched(problem: Problem, c: Candidate) -> float:
    """Seconds of a micro-batch's gathers of sharded parameters and scatters of gradients that compute does not hide, of the stage
    that has least of them."""
    if c.sharding in ("none", "optimizer"):
        return 0.0
    blocks, pp, bounds, overlap = problem.blocks(c), c.cuts.pp, bounds_of(problem, c), problem.machine.overlap
    wire, found, by_block = wire_factor(problem.config) * (1 - 1 / c.micro_batches), [0.0] * pp, problem.parameters(c.cuts)
    for v, (nbytes, f, b, n, m) in enumerate(zip(*(sums(of, bounds) for of in (
            by_block, blocks.forward, blocks.backward, [min(1, size) for size in by_block])), buckets_of(problem, c))):
        ahead = _among_replicas(problem, c, "all_gather", nbytes, n) if c.sharding == "parameters" else 0.0
        back = ahead + _among_replicas(problem, c, "reduce_scatter", nbytes, m) * wire
        found[v % pp] += max(0.0, ahead - overlap * f) + max(0.0, back - overlap * (b + (f if c.recompute else 0.0)))
    return min(found)


def buckets_of(problem: Problem, c: Candidate) -> list[int]:
    """How many buckets of gradients each virtual stage has at least: further ones end where a run may not join parameters."""
    def count() -> list[int]:
        most, sizes, found = max(1, problem.config.comm.bucket_bytes // ITEM), problem.sizes(c.cuts), list[int]()
        for a, b in pairwise(bounds_of(problem, c)):
            number, inside = 0, 0
            for size in (size for block in reversed(sizes[a:b]) for size in reversed(block)):
                inside += size
                if inside >= most:
                    number, inside = number + 1, 0
            found.append(number + (inside > 0))
        return found
    counted: list[int] = problem.once(("buckets", c.cuts, c.chunks), count)
    return counted


def _among_replicas(problem: Problem, c: Candidate, operation: str, nbytes: float, number: int) -> float:
    """Seconds of so many collectives of so many bytes together, of the ranks that have the same parameters; 0 where experts have
    others. All-reduces count as one: by which algorithm they go depends on their sizes."""
    n, stride = group(tuple(c.mesh.get(axis, 1) for axis in AXES), REPLICAS)
    if n == 1 or c.cuts.ep > 1 or nbytes <= 0:
        return 0.0
    levels, algorithm = problem.machine_of(c).levels, algorithm_of(problem.config)
    seconds = level_seconds(operation, n, stride, nbytes, levels, algorithm)
    if operation != "all_reduce":
        return seconds + (number - 1) * level_seconds(operation, n, stride, NOTHING, levels, algorithm)
    together = stream_seconds(n, stride, nbytes, levels) if algorithm == "auto" else None
    return seconds if together is None else min(seconds, together)


def bounds_of(problem: Problem, c: Candidate) -> list[int]:
    """Virtual stage v is blocks [v]:[v + 1]."""
    parts, own = c.cuts.pp * c.chunks, problem.config.mesh.stages
    if parts == 1:
        return [0, problem.n_blocks]
    counts = own if not isinstance(own, str) and len(own) == parts and sum(own) == problem.n_blocks else ()
    return find_bounds(problem.n_blocks, c.cuts.pp, c.chunks, counts)


def sums(costs: Sequence[float], bounds: Sequence[int]) -> list[float]:
    return [sum(costs[a:b]) for a, b in pairwise(bounds)]
