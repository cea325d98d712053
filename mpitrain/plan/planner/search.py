"""Finds the fastest candidates without timing all of them.

    all candidates, by a lower bound of their step  ->  timed, by their step  ->  memory, and what `train` says  ->  a plan
                     |_______________________ the lowest of both goes first ________________________|

A candidate is timed only while its bound is lower than the steps that are known, and its memory is looked at only when nothing
can be faster: best-first search (Hart, Nilsson, Raphael, 1968, with a bound that is never above the step).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from mpitrain.placement.bytes import Forecast, Use
from mpitrain.plan.planner.bound import bound
from mpitrain.plan.planner.candidates import Candidate, candidates, cuts_of
from mpitrain.plan.planner.problem import Problem
from mpitrain.plan.planner.work import step_time
from mpitrain.schedules.step_simulate import StepTime


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
    limit = problem.machine.memory_bytes
    heap: list[tuple[float, Any, Candidate, StepTime | None]] = [
        (bound(problem, c), c.order(), c, None) for c in all_of(problem, ranks)]
    heapify(heap)
    while heap:
        _, order, c, step = heappop(heap)
        if step is None:
            if problem.allows(c) and problem.cut(c) is not None:
                step = step_time(problem, c)
                heappush(heap, (step.total, order, c, step))
            continue
        plan = Plan(c, step, problem.forecast(c))
        if limit and plan.memory > limit:
            problem.too_large(c, plan.forecast)
        elif problem.accepts(c):
            yield plan


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
