"""Finds the fastest candidates without timing all of them.

    rough bound  ->  near bound  ->  seconds of a step  ->  memory, and what `train` says  ->  a plan
       |__________________ the lowest of all goes first _________________|

A candidate is timed only while its bound is lower than the steps that are known, and its memory is looked at only when nothing
can be faster: best-first search (Hart, Nilsson, Raphael, 1968, with bounds that are not above the step).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from mpitrain.placement.bytes import Forecast, Use
from mpitrain.plan.planner.bound import near, rough
from mpitrain.plan.planner.candidates import Candidate, candidates, cuts_of
from mpitrain.plan.planner.problem import Problem
from mpitrain.plan.planner.room import Room
from mpitrain.plan.planner.work import step_time
from mpitrain.schedules.step_simulate import StepTime


class Known(NamedTuple):
    """What is known of a candidate: whether its bound is the near one, and its step."""

    candidate: Candidate
    bounded: bool = False
    step: StepTime | None = None


class Plan(NamedTuple):
    """A candidate that fits and that `train` accepts: its step, and the memory of a rank of each stage."""

    candidate: Candidate
    step: StepTime
    forecast: Forecast

    @property
    def memory(self) -> int:
        """Bytes of the rank that takes most."""
        return max(map(total, self.forecast.stages))


def total(use: Use) -> int:
    """All memory of a rank's arrays; where the pool is not known, what stays from step to step."""
    return use.pool if use.pool is not None else use.parameters + use.gradients + use.optimizer + use.copies


def best_first(problem: Problem, ranks: int) -> Iterator[Plan]:
    """The plans for so many ranks, the fastest first; of equally fast ones the plainest."""
    limit, room = problem.machine.memory_bytes, Room(problem)
    heap: list[tuple[float, Any, Known]] = [(rough(problem, c), c.order(), Known(c)) for c in all_of(problem, ranks)]
    heapify(heap)
    while heap:
        _, order, (c, bounded, step) = heappop(heap)
        if step is not None:
            plan = Plan(c, step, problem.forecast(c))
            room.learn(c, plan.forecast)
            if (not limit or plan.memory <= limit) and problem.accepts(c):
                yield plan
        elif bounded:
            if not room.surely_lacks(c) and problem.cut(c) is not None:
                step = step_time(problem, c)
                heappush(heap, (step.total, order, Known(c, True, step)))
        elif not room.surely_lacks(c) and problem.allows(c) and problem.traffic(c.cuts) is not None:
            heappush(heap, (near(problem, c), order, Known(c, True)))


def predict(problem: Problem, c: Candidate) -> StepTime:
    """Seconds of a step of one candidate, as `candidate_of` takes it from a configuration. The error of `train` where the model
    cannot be cut so."""
    problem.require(c)
    return step_time(problem, c)


def all_of(problem: Problem, ranks: int) -> Iterator[Candidate]:
    """The candidates whose layers can be shared as they say."""
    for cuts in cuts_of(ranks, problem.n_blocks, experts=bool(problem.facts.mixture)):
        if problem.shared(cuts) is not None:
            yield from candidates(cuts, ranks, problem.config, problem.n_blocks, sequential=problem.sequential)
