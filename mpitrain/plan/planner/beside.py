"""Prediction and measurement of a run's step side by side, for run.json: what `log.machine` asks for."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from mpitrain.config import Config
from mpitrain.machines.machine import MachineFile
from mpitrain.plan.planner.candidates import candidate_of
from mpitrain.plan.planner.problem import Problem
from mpitrain.plan.planner.result import PARTS, origins
from mpitrain.plan.planner.work import step_time
from mpitrain.train.build.inputs import Inputs
from mpitrain.train.intervals import Step
from mpitrain.train.machine import threads
from mpitrain.train.observers.observer import Observer, Watched

WARM = 3                      # first steps that are left out where there are twice as many: they touch memory, and tune


def predicted(config: Config, machine: MachineFile, ranks: int, inputs: Inputs, own_threads: int) -> dict[str, Any]:
    """The predicted seconds of a step of this run, in parts, and what they rest on, as `plan` has them. Blocks may be timed for
    it, on threads of their own number; afterwards this process has `own_threads` again."""
    try:
        problem = Problem(config, machine, inputs)
        c = candidate_of(config, ranks)
        problem.require(c)
        step = step_time(problem, c)
    finally:
        threads.pin(own_threads)
    return {"machine": machine.name, "predicted": {name: getattr(step, name) for name in ("total", *PARTS)},
            "rests_on": origins(problem, c)}


class Beside(Observer):
    """Takes the times of steps; the end of a run has their median beside the prediction."""

    def __init__(self, found: Mapping[str, Any]):
        self.found, self.seconds = found, list[float]()

    def begin(self, run: Watched) -> None:
        self.run = run

    def after_step(self, step: int, fields: Step, seconds: float) -> None:
        self.seconds.append(seconds)

    def finish(self, step: int) -> Mapping[str, Any]:
        if not self.seconds:
            return {}
        counted = self.seconds[WARM if len(self.seconds) >= 2 * WARM else 0:]
        measured, total = statistics.median(counted), self.found["predicted"]["total"]
        self.run.tell(f"a step took {1e3 * measured:.4g} ms (median of {len(counted)}); predicted by {self.found['machine']}: "
                      f"{1e3 * total:.4g} ms")
        return {"plan": {**self.found, "measured": {"median": measured, "steps": len(counted)},
                         "predicted_over_measured": total / measured if measured else None}}
