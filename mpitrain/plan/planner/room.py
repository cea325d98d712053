"""Memory that a candidate takes at least, so that most of those that do not fit are never timed, nor looked at closely.

    parameters, gradients, optimizer state    by the formula of `placement.bytes`, one sum of gradients
    activations                               those of a candidate with as many rows in a micro-batch or fewer, cut and run alike,
                                              whose memory was forecast before
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mpitrain.placement.bytes import Forecast, predicted
from mpitrain.plan.planner.bound import bounds_of, sums
from mpitrain.plan.planner.candidates import Candidate
from mpitrain.plan.planner.problem import Problem

ITEM = 4                      # bytes of a number of these


class Room:
    """What forecasts of one problem have said."""

    def __init__(self, problem: Problem):
        self.problem, self.limit = problem, problem.machine.memory_bytes
        self._known: dict[Any, list[tuple[int, list[int]]]] = {}

    def surely_lacks(self, c: Candidate) -> bool:
        """Whether the candidate cannot fit."""
        if not self.limit or self.problem.config.comm.node_shared:
            return False
        states = list(self._states(c))
        least = [[0] * len(states), *(kept for rows, kept in self._known.get(self._key(c), ()) if rows <= self.problem.rows(c))]
        return any(max(s + a for s, a in zip(states, kept)) > self.limit for kept in least)

    def learn(self, c: Candidate, found: Forecast) -> None:
        """Notes the activations of a candidate's stages."""
        kept = [use.activations or 0 for use in found.stages]
        self._known.setdefault(self._key(c), []).append((self.problem.rows(c), kept))

    def _key(self, c: Candidate) -> Any:
        """Candidates of one key keep as many micro-batches at once: all of them together where a schedule keeps all."""
        kept = c.micro_batches if c.schedule == "gpipe" or c.micro_batches < c.cuts.pp else 0
        return c.cuts, c.chunks, c.schedule, c.recompute, kept

    def _states(self, c: Candidate) -> Iterator[int]:
        """Bytes of the parameters, gradients and optimizer state of each stage."""
        bounds, pp = bounds_of(self.problem, c), c.cuts.pp
        kind, offloaded = c.sharding if c.replicas > 1 else "none", self.problem.config.optimizer.offload != "none"
        parameters = sums(self.problem.parameters(c.cuts), bounds)
        states = sums(self.problem.states(c.cuts), bounds)
        for s in range(pp):
            size, state = round(sum(parameters[s::pp])) // ITEM, 0 if offloaded else round(sum(states[s::pp]))
            found = predicted(size, kind, c.replicas, state=state)
            yield found.parameters + found.gradients + found.optimizer
