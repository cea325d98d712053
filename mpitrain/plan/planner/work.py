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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.machines.measured import layer_seconds
from mpitrain.nn import FlatLayout, Sequential
from mpitrain.placement.place import Placement
from mpitrain.placement.stages import Stage as PlacedStage
from mpitrain.plan.planner.candidates import Candidate
from mpitrain.plan.planner.compute import Blocks
from mpitrain.plan.planner.problem import Problem
from mpitrain.plan.planner.traffic import BlockTraffic, sized
from mpitrain.schedules.grid import REPLICAS
from mpitrain.schedules.step_simulate import Bucket, Collective, Stage, StepTime, Work, simulate_step

HALF = 0.5                    # bytes of numbers in 16 bits, of those in 32


class Leaves(NamedTuple):
    """A bucket of gradients, which is whole when its parameters (`names`) in its lowest block are there. Where nobody has timed
    these, at a `share` of that block's backward: backward comes to parameters in the opposite order, and as many of them take
    about as long."""

    nbytes: float
    axes: tuple[str, ...]
    lowest: int
    share: float
    names: tuple[str, ...]


class Sent:
    """The gradients and parameters of each virtual stage: buckets as they leave, and blocks as they are gathered."""

    def __init__(self, stages: Sequence[Placement], layouts: Sequence[FlatLayout], wire: float):
        self.buckets: dict[int, list[Leaves]] = {}
        self.gathered: dict[int, tuple[Collective, ...]] = {}
        places = stages[0].stage.places                       # of the whole model: alike on all stages
        for p, layout in zip(stages, layouts):
            self._of_stage(p, layout, places, wire)

    def _of_stage(self, p: Placement, layout: FlatLayout, places: Mapping[str, int], wire: float) -> None:
        stage = p.stage
        item, begins = layout.dtype.itemsize, [s.start for s in layout.segments]
        of_block: dict[int, float] = {}
        ends: dict[int, tuple[int, int]] = {}                 # where the parameters of each block begin and stop
        for s in layout.segments:
            block = places.get(s.name, 0)
            of_block[block] = of_block.get(block, 0.0) + (s.stop - s.start) * item
            begin, stop = ends.get(block, (s.start, s.stop))
            ends[block] = min(begin, s.start), max(stop, s.stop)
        for bucket in p.buckets(layout):
            inside = layout.segments[bisect_left(begins, bucket.start):bisect_left(begins, bucket.stop)]
            if inside:
                lowest = min(places.get(s.name, 0) for s in inside)
                virtual = bisect_right(stage.bounds, lowest) - 1
                begin, stop = ends[lowest]
                share = (stop - max(bucket.start, begin)) / max(stop - begin, 1)
                self.buckets.setdefault(virtual, []).append(
                    Leaves((bucket.stop - bucket.start) * item * wire, p.sums_over(inside[0].parameter), lowest, share,
                           tuple(s.name for s in inside if places.get(s.name, 0) == lowest)))
        for v in range(stage.index, stage.n_virtual, stage.n_stages):
            self.gathered[v] = tuple(Collective("all_gather", REPLICAS, of_block[b])
                                     for b in range(stage.bounds[v], stage.bounds[v + 1]) if b in of_block)


def step_time(problem: Problem, c: Candidate) -> StepTime:
    """Seconds of a step of the candidate, in parts."""
    return simulate_step(work_of(problem, c), c.mesh, c.schedule, c.micro_batches, problem.machine_of(c),
                         algorithm=algorithm_of(problem.config))


def algorithm_of(config: Config) -> str:
    """The algorithm that sums are timed by: the run's, or "auto" for one of its own."""
    algorithm = config.comm.algorithm
    return algorithm if isinstance(algorithm, str) and ":" not in algorithm else "auto"


def work_of(problem: Problem, c: Candidate) -> Work:
    """The work of the candidate, which can be cut as it says."""
    rows, blocks, config = problem.rows(c), problem.blocks(c), c.applied(problem.config)
    cut, heard = problem.cut(c), problem.traffic(c.cuts)
    assert cut is not None and heard is not None, "they have been found to be there"
    sent = problem.once(("sent", c.cuts, c.chunks, c.sharding if c.replicas > 1 else "none"),
                        lambda: Sent(problem.stages(c, config), cut.layouts, wire_factor(config)))
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
    buckets = [Bucket(one.nbytes, min(1.0, ready(one, blocks, stop) / (backward or 1.0)), operation, one.axes)
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
        timed(problem, c, sized(of_forward, size)), timed(problem, c, sized(of_backward, size)), (*sized(ring, size), *gathered),
        (*sized(ring_back, size), *gathered, *every), tuple(buckets))


def ready(leaves: Leaves, blocks: Blocks, stop: int) -> float:
    """Seconds from the beginning of the backward of blocks up to `stop` until a bucket is whole."""
    share = max((blocks.ready.get(name, leaves.share) for name in leaves.names), default=leaves.share)
    return sum(blocks.backward[leaves.lowest + 1:stop]) + share * blocks.backward[leaves.lowest]


def timed(problem: Problem, c: Candidate, collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """The same, where those along tp take what sums of layers were measured to, if somebody has."""
    ranks, tp = prod(c.mesh.values()), c.cuts.tp
    return tuple(replace(one, seconds=layer_seconds(problem.machine, ranks, tp, one.nbytes)) if one.axes == ("tp",) else one
                 for one in collectives)


def width_factor(problem: Problem) -> float:
    """Bytes of activations on the run's device, of those that were heard on the host."""
    return HALF if problem.on_gpu and problem.config.train.precision in ("bfloat16", "float16") else 1.0


def wire_factor(config: Config) -> float:
    """Bytes of a gradient's message, of those of the gradient."""
    return 1.0 if config.comm.wire_dtype == "float32" else HALF
