"""Pipeline schedules: which stage does what in which order, as plain data.

A schedule names forwards and backwards of micro-batches only; whoever runs it inserts the messages between stages. With one
stage a schedule is gradient accumulation. Backwards run in the order of the micro-batches in every schedule, so gradients
are accumulated in one order and the schedules agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from mpitrain.registry import Registry
from mpitrain.schedules.steps import ScheduleError


class Action(NamedTuple):
    """Forward ("F") or backward ("B") of one micro-batch; printed as ``F0``, ``B3``."""

    kind: Literal["F", "B"]
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro}"


Schedule: TypeAlias = Callable[[int, int, int], Iterator[Action]]     # (stage, n_stages, n_micro) -> that stage's actions
SCHEDULES: Registry[Schedule] = Registry("pipeline schedule")


@SCHEDULES.register("gpipe")
def gpipe(stage: int, n_stages: int, n_micro: int) -> Iterator[Action]:
    """All forwards, then all backwards (Huang et al., 2019): simple, and every micro-batch's activations live at once."""
    yield from (Action("F", micro) for micro in range(n_micro))
    yield from (Action("B", micro) for micro in range(n_micro))


@SCHEDULES.register("1f1b")
def one_f_one_b(stage: int, n_stages: int, n_micro: int) -> Iterator[Action]:
    """Fill the pipeline, then alternate one forward and one backward (Narayanan et al., 2019); at most n_stages - stage live.

        n_stages = 2, n_micro = 3     stage 0:  F0 F1 B0 F2 B1 B2
                                      stage 1:  F0 B0 F1 B1 F2 B2
    """
    ahead = min(n_stages - stage - 1, n_micro)
    yield from (Action("F", micro) for micro in range(ahead))
    for micro in range(n_micro - ahead):
        yield Action("F", micro + ahead)
        yield Action("B", micro)
    yield from (Action("B", micro) for micro in range(n_micro - ahead, n_micro))


def check_pipeline(schedule: Schedule, n_stages: int, n_micro: int) -> list[int]:
    """Run all stages against each other: the peak number of live activations of each. ScheduleError when it cannot end right.

    Activations of a micro-batch live on a stage from its forward to its backward. Messages rendezvous: a stage goes on when
    its neighbour has what it needs, so an order that waits in a circle is found.
    """
    programs = [list(schedule(stage, n_stages, n_micro)) for stage in range(n_stages)]
    every = {Action(kind, micro) for kind in ("F", "B") for micro in range(n_micro)}
    for stage, program in enumerate(programs):
        if len(program) != len(every) or set(program) != every:
            raise ScheduleError(f"stage {stage} of {n_stages} runs {' '.join(map(str, program))}; it should run forward and "
                                f"backward of each of {n_micro} micro-batches once")
    done: list[set[Action]] = [set() for _ in programs]
    live, peak, at = [0] * n_stages, [0] * n_stages, [0] * n_stages
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while at[stage] < len(program) and is_ready(program[at[stage]], stage, done):
                action = program[at[stage]]
                done[stage].add(action)
                live[stage] += 1 if action.kind == "F" else -1
                peak[stage] = max(peak[stage], live[stage])
                at[stage] += 1
                moved = True
    stuck = [f"stage {stage} waits before {program[i]}" for stage, (program, i) in enumerate(zip(programs, at))
             if i < len(program)]
    if stuck:
        raise ScheduleError(f"deadlock: {'; '.join(stuck)}")
    return peak


def is_ready(action: Action, stage: int, done: list[set[Action]]) -> bool:
    """Whether a stage has its input: the forward from the stage before, the backward from the stage behind."""
    if action.kind == "F":
        return stage == 0 or action in done[stage - 1]
    own_forward = Action("F", action.micro) in done[stage]
    return own_forward and (stage == len(done) - 1 or action in done[stage + 1])
