"""A plan in numbers: samples a second, efficiency, energy, and what each number rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from mpitrain.machines.machine import MachineFile
from mpitrain.machines.measured import beside_others, beyond
from mpitrain.plan.planner.candidates import Candidate
from mpitrain.plan.planner.problem import Problem
from mpitrain.plan.planner.search import Plan
from mpitrain.schedules.step_simulate import StepTime

NOTHING = 1e-12               # seconds that come of rounding
PARTS = [name for name in StepTime.__dataclass_fields__ if name != "total"]


class Figures(NamedTuple):
    """Predicted of a plan. `efficiency`: samples a second of a rank over those of one rank that computes alone, with the same
    rows in a micro-batch. `joules` of a sample, None where the machine file has no watts."""

    samples_per_s: float
    efficiency: float
    joules: float | None


def figures(problem: Problem, plan: Plan) -> Figures:
    """The figures of a plan of this problem."""
    c, total, batch = plan.candidate, plan.step.total, problem.config.train.batch_size
    ranks = prod(c.mesh.values())
    alone = problem.alone(c)
    return Figures(batch / total, alone / (ranks * total), joules_of_step(problem, plan, ranks, batch))


def joules_of_step(problem: Problem, plan: Plan, ranks: int, batch: int) -> float | None:
    """Estimated joules of a sample: watts of a busy processor while a rank computes, of an idle one while it waits; None where
    one of them is unknown."""
    machine, step = problem.machine, plan.step
    if no_watts(machine):
        return None
    busy = min(step.total, step.compute + step.update)
    return ranks * (machine.busy_watts * busy + machine.idle_watts * (step.total - busy)) / batch


def origins(problem: Problem, c: Candidate) -> dict[str, str]:
    """What each part of a step rests on: measured here, the machine file, or assumed."""
    machine = problem.machine
    more = f"; {said}" if (said := beyond(machine, prod(c.mesh.values()))) else ""
    found = {"compute": problem.blocks(c).origin + more,
             "tensor, bubble, exposed": of_machine(machine, "levels", "collective_s", "message_s", "overlap") + more,
             "update": of_machine(machine, "memory_bandwidth") + more,
             "stragglers": of_machine(machine, "spread") + more if machine.spread else
             "none: the machine file has no spread of steps"}
    return found | ({"calibration": said} if (said := beside_others(machine)) else {})


def of_machine(machine: MachineFile, *keys: str) -> str:
    """Where the machine's numbers of these keys come from, in words."""
    assumed = [key for key in machine.assumed if any(key == k or key.startswith(f"{k}.") for k in keys)]
    what = f"measured: the machine file {machine.name}" if machine.measured else f"the machine file {machine.name}"
    return what + (f"; assumed: {', '.join(assumed)}" if assumed else "")


def rests_on(problem: Problem, plan: Plan) -> dict[str, str]:
    """What each number of a plan rests on."""
    lacks = no_watts(problem.machine)
    return {**origins(problem, plan.candidate), "memory": plan.forecast.why or "a few rows, run here, as inspect does",
            "joules": f"unknown: the machine file has no {lacks}" if lacks else
            f"estimated by {of_machine(problem.machine, 'busy_watts', 'idle_watts')}"}


def no_watts(machine: MachineFile) -> str:
    """Which of its watts a machine file lacks, in words; "" for none."""
    lacking = [key for key in ("busy_watts", "idle_watts") if not getattr(machine, key)]
    return "watts" if len(lacking) == 2 else "".join(lacking)


def as_json(problem: Problem, plan: Plan, place: int) -> dict[str, Any]:
    """A plan as plain data; `place` is 1 for the best."""
    found, c = figures(problem, plan), plan.candidate
    return {"ranks": prod(c.mesh.values()), "place": place, "machine": problem.machine.name,
            "overrides": c.overrides(problem.written), "mesh": c.mesh, "schedule": c.schedule, "chunks": c.chunks,
            "micro_batches": c.micro_batches * c.places, "sharding": c.sharding, "recompute": c.recompute,
            "seconds": {name: getattr(plan.step, name) for name in ("total", *PARTS)},
            "memory": {"bytes": plan.memory, "limit": problem.machine.memory_bytes or None,
                       "stages": [use._asdict() for use in plan.forecast.stages]},
            "samples_per_s": found.samples_per_s, "efficiency": found.efficiency, "joules_per_sample": found.joules,
            "rests_on": rests_on(problem, plan)}


def table_of(problem: Problem, plans: Sequence[Plan], first: Sequence[str]) -> list[tuple[str, ...]]:
    """A row for each plan, behind a first cell."""
    return [(head, *_row(problem, plan)) for head, plan in zip(first, plans)]


HEADS = ("ms a step", *PARTS, "MiB a rank", "samples/s", "efficiency", "J/sample")


def _row(problem: Problem, plan: Plan) -> Iterator[str]:
    found = figures(problem, plan)
    yield from (_ms(getattr(plan.step, name)) for name in ("total", *PARTS))
    yield f"{plan.memory / 2**20:,.2f}"
    yield f"{found.samples_per_s:,.1f}"
    yield f"{found.efficiency:.3f}"
    yield "unknown" if found.joules is None else f"{found.joules:,.4g}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}" if seconds > NOTHING else "0"
