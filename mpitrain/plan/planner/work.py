"""The work of a step of a candidate, for `schedules.step_simulate`: seconds of stages, collectives, buckets.

    comm.sharding    in each micro-batch                           in the last backward         after the update
    none                                                           all-reduce of buckets
    optimizer                                                      reduce-scatter of buckets    all-gather of parameters
    gradients        reduce-scatter of buckets, behind backward    reduce-scatter of buckets    all-gather of parameters
    parameters       the same, and all-gather of blocks, ahead     reduce-scatter of buckets

Recomputed blocks run forward once more in backward, with their collectives. A backward that is split takes half its seconds for
the gradient of the input, and half for those of parameters.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.machines.measured import at_ranks
from mpitrain.nn import Sequential
from mpitrain.placement.place import Placement
from mpitrain.placement.stages import Stage as PlacedStage
from mpitrain.plan.planner.candidates import Candidate
from mpitrain.plan.planner.compute import Blocks
from mpitrain.plan.planner.problem import Problem
from mpitrain.plan.planner.traffic import BlockTraffic
from mpitrain.schedules.grid import REPLICAS
from mpitrain.schedules.step_simulate import Bucket, Collective, Stage, StepTime, Work, simulate_step

HALF = 0.5                    # bytes of numbers in 16 bits, of those in 32


class Leaves(NamedTuple):
    """A bucket of gradients, which is whole when the backward of its lowest block is done."""

    nbytes: float
    axes: tuple[str, ...]
    lowest: int


class Sent:
    """The gradients and parameters of each virtual stage: buckets as they leave, and blocks as they are gathered."""

    def __init__(self, stages: Sequence[Placement], wire: float):
        self.buckets: dict[int, list[Leaves]] = {}
        self.gathered: dict[int, tuple[Collective, ...]] = {}
        for p in stages:
            self._of_stage(p, wire)

    def _of_stage(self, p: Placement, wire: float) -> None:
        layout, places, stage = p.layout(), p.stage.places, p.stage
        item, begins = layout.dtype.itemsize, [s.start for s in layout.segments]
        of_block: dict[int, float] = {}
        for s in layout.segments:
            block = places.get(s.name, 0)
            of_block[block] = of_block.get(block, 0.0) + (s.stop - s.start) * item
        for bucket in p.buckets(layout):
            inside = layout.segments[bisect_left(begins, bucket.start):bisect_left(begins, bucket.stop)]
            if inside:
                lowest = min(places.get(s.name, 0) for s in inside)
                virtual = bisect_right(stage.bounds, lowest) - 1
                self.buckets.setdefault(virtual, []).append(
                    Leaves((bucket.stop - bucket.start) * item * wire, p.sums_over(inside[0].parameter), lowest))
        for v in range(stage.index, stage.n_virtual, stage.n_stages):
            self.gathered[v] = tuple(Collective("all_gather", REPLICAS, of_block[b])
                                     for b in range(stage.bounds[v], stage.bounds[v + 1]) if b in of_block)


def step_time(problem: Problem, c: Candidate) -> StepTime:
    """Seconds of a step of the candidate, in parts."""
    algorithm = problem.config.comm.algorithm
    name = algorithm if isinstance(algorithm, str) and ":" not in algorithm else "auto"
    by_messages = name != "auto" or c.sharding in ("gradients", "parameters")
    machine = problem.once(("machine", by_messages, prod(c.mesh.values())),
                           lambda: at_ranks(problem.machine, prod(c.mesh.values()), by_messages=by_messages))
    return simulate_step(work_of(problem, c), c.mesh, c.schedule, c.micro_batches, machine, algorithm=name)


def work_of(problem: Problem, c: Candidate) -> Work:
    """The work of the candidate, which can be cut as it says."""
    rows, blocks, config = problem.rows(c), problem.blocks(c), c.applied(problem.config)
    cut, heard = problem.cut(c), problem.traffic(c.cuts)
    assert cut is not None, "it has been found to be there"
    sent = problem.once(("sent", c.cuts, c.chunks, c.sharding if c.replicas > 1 else "none"),
                        lambda: Sent(problem.stages(c, config), wire_factor(config)))
    made = [_stage(problem, c, cut.stages[v % c.cuts.pp].stage, v, blocks, heard, rows, sent)
            for v in range(c.cuts.pp * c.chunks)]
    cut_over = c.replicas if c.sharding != "none" else 1
    update = max(sum(sum(blocks.update[cut.bounds[v]:cut.bounds[v + 1]]) for v in range(s, len(made), c.cuts.pp))
                 for s in range(c.cuts.pp)) / cut_over
    return Work(tuple(made), update + blocks.step, _after(c, sent))


def _after(c: Candidate, sent: Sent) -> tuple[Collective, ...]:
    """The gathers of the stage that has most parameters, where they follow the update."""
    if c.sharding not in ("optimizer", "gradients"):
        return ()
    by_stage = [[Collective("all_gather", REPLICAS, bucket.nbytes) for v in range(s, c.cuts.pp * c.chunks, c.cuts.pp)
                 for bucket in sent.buckets.get(v, ())] for s in range(c.cuts.pp)]
    return tuple(max(by_stage, key=lambda them: sum(one.nbytes for one in them)))


def _stage(problem: Problem, c: Candidate, stage: PlacedStage, v: int, blocks: Blocks, heard: Sequence[BlockTraffic],
           rows: int, sent: Sent) -> Stage:
    first, stop = stage.bounds[v], stage.bounds[v + 1]
    chunk = stage.chunks[v // c.cuts.pp]
    names = list(chunk.blocks) if isinstance(chunk, Sequential) else []
    again = [first + place for place, name in enumerate(names)
             if isinstance(chunk, Sequential) and chunk.recompute and chunk.recomputes(place, name)]
    backward = sum(blocks.backward[first:stop])
    size = width_factor(problem) * rows
    within = range(first, stop)
    operation = "all_reduce" if c.sharding == "none" else "reduce_scatter"
    buckets = [Bucket(one.nbytes, min(1.0, sum(blocks.backward[one.lowest:stop]) / (backward or 1.0)), operation, one.axes)
               for one in sent.buckets.get(v, ())]
    every = () if c.sharding not in ("gradients", "parameters") or c.micro_batches == 1 else tuple(
        Collective("reduce_scatter", bucket.axes, bucket.nbytes, (c.micro_batches - 1) / c.micro_batches) for bucket in buckets)
    gathered = tuple(sent.gathered[v]) if c.sharding == "parameters" else ()
    of_forward, ring = [one for b in within for one in heard[b].forward], [one for b in within for one in heard[b].ring_forward]
    of_backward = [one for b in within for one in heard[b].backward] + [one for b in again for one in heard[b].forward]
    ring_back = [one for b in within for one in heard[b].ring_backward] + [one for b in again for one in heard[b].ring_forward]
    return Stage(
        sum(blocks.forward[first:stop]), backward / 2 + sum(blocks.forward[b] for b in again), backward / 2,
        heard[stop - 1].nbytes * size if stop < problem.n_blocks else 0.0,
        _sized(of_forward, size), _sized(of_backward, size), (*_sized(ring, size), *gathered),
        (*_sized(ring_back, size), *gathered, *every), tuple(buckets))


def _sized(collectives: Sequence[Collective], factor: float) -> tuple[Collective, ...]:
    """Of so many rows; equal ones are one, counted."""
    found: dict[tuple[str, tuple[str, ...], float], float] = {}
    for one in collectives:
        key = one.operation, one.axes, one.nbytes * factor
        found[key] = found.get(key, 0.0) + one.count
    return tuple(Collective(*key, count) for key, count in found.items())


def width_factor(problem: Problem) -> float:
    """Bytes of activations on the run's device, of those that were heard on the host."""
    return HALF if problem.on_gpu and problem.config.train.precision in ("bfloat16", "float16") else 1.0


def wire_factor(config: Config) -> float:
    """Bytes of a gradient's message, of those of the gradient."""
    return 1.0 if config.comm.wire_dtype == "float32" else HALF
