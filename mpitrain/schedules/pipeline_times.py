"""Times a pipeline of many micro-batches fast, for whoever compares hundreds of them; the model is `pipeline_simulate`'s.

The order in which data can flow does not depend on seconds, so it is found once for a schedule and its sizes (`flow_of`), and a
timing is one pass over it. Once a pipeline is full, a group of p micro-batches more takes it a fixed time longer: of very long
steps two short ones are timed, and the rest follows.

    micro-batches     filling | p | p | p | .. | draining          seconds(m) = seconds(s) + (m - s) / p  seconds of a group
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

from mpitrain.schedules.pipeline import SCHEDULES, Schedule
from mpitrain.schedules.pipeline_check import checked_programs, flow, takes_chunks
from mpitrain.schedules.pipeline_turns import stops_in_turns

MOST = 12_000                  # actions of all stages that are timed one by one: 10 ms
GROUPS = 4                     # at least so many groups of p micro-batches or a few more are in the longer of the short ones


class Flow(NamedTuple):
    """A schedule's actions in an order in which data can flow. Of each: its stage, its kind and virtual stage as one number
    (`kind * n_virtual + virtual`), its place among results, the place of what it needs (-1: nothing), and the message's virtual
    stage. `last` are the places of the actions that end the gradients of each virtual stage. `split`: B is without W."""

    steps: list[tuple[int, int, int, int]]
    last: list[int]
    split: bool


class PipelineTimes(NamedTuple):
    """Seconds: when all stages are done, when each one is, and when the last gradients of each virtual stage begin and end."""

    total: float
    stops: list[float]
    last: list[tuple[float, float]]


@lru_cache(maxsize=256)
def flow_of(schedule: Schedule, n_stages: int, n_micro: int, chunks: int) -> Flow:
    """ScheduleError for a schedule that `check_pipeline` refuses; the built-in ones are proved by tests."""
    in_chunks = takes_chunks(schedule)
    if (chunks == 1 or in_chunks) and any(schedule is SCHEDULES[name] for name in SCHEDULES):
        given = {"chunks": chunks} if in_chunks else {}
        programs = [list(schedule(stage, n_stages, n_micro, **given)) for stage in range(n_stages)]
    else:
        programs = checked_programs(schedule, n_stages, n_micro, chunks)
    split, n_virtual = any(action.kind == "W" for action in programs[0]), n_stages * chunks
    number = {"F": 0, "B": n_virtual, "W": 2 * n_virtual}
    codes = [[(number[kind] + chunk * n_stages + stage) * n_micro + micro for kind, micro, chunk in program]
             for stage, program in enumerate(programs)]
    places, steps = _in_order(codes, n_stages, n_virtual, n_micro)
    if len(steps) < sum(map(len, codes)):
        for _ in flow(programs, chunks):                      # raises, with the circle in words
            pass
    final = (number["W" if split else "B"] + virtual for virtual in range(n_virtual))
    return Flow(steps, [places[(kind + 1) * n_micro - 1] if n_micro else -1 for kind in final], split)


def _in_order(codes: Sequence[Sequence[int]], n_stages: int, n_virtual: int, n_micro: int
              ) -> tuple[list[int], list[tuple[int, int, int, int]]]:
    """`flow` on numbers, (kind * n_virtual + virtual stage) * n_micro + micro-batch: 1 us an action where that takes 8."""
    places = [-1] * (3 * n_virtual * n_micro)
    steps: list[tuple[int, int, int, int]] = []
    at, ready = [0] * n_stages, deque(range(n_stages))
    waiting: dict[int, int] = {}                              # the stage that waits, by the code that it waits for
    first, last = n_micro, (2 * n_virtual - 1) * n_micro
    while ready:
        stage = ready.popleft()
        program = codes[stage]
        for index in range(at[stage], len(program)):
            code = program[index]
            kind = code // n_micro
            if kind < n_virtual:
                need, sent = code - n_micro if code >= first else -1, kind - 1
            else:
                need, sent = code + n_micro if code < last else -1, kind - n_virtual
            if need >= 0 and places[need] < 0:
                waiting[need] = stage
                break
            places[code] = len(steps)
            steps.append((stage, kind, places[need] if need >= 0 else -1, sent))
            at[stage] = index + 1
            if code in waiting:
                ready.append(waiting.pop(code))
    return places, steps


def pipeline_times(name: str | Schedule, n_stages: int, n_micro: int, forward: Sequence[float], backward: Sequence[float],
                   weight: Sequence[float], messages: Sequence[float], cores: float = inf,
                   waiting: float = 0.0) -> PipelineTimes:
    """The times of a schedule at so many seconds of each virtual stage, and of the message between it and the next one.

    As `simulate_pipeline` has them; of more than `MOST` actions by what groups take, which is within 1e-4 where stages are alike,
    and within 1 % where their seconds differ by a third. Where the stages have fewer `cores` than they are, they take turns,
    in which one that waits weighs `waiting` of one that computes. ScheduleError for a schedule that cannot be.
    """
    schedule, chunks = SCHEDULES.resolve(name) if isinstance(name, str) else name, len(forward) // n_stages
    seconds = forward, backward, weight, messages if n_stages > 1 else [0.0] * len(forward), cores, waiting
    groups = n_micro // n_stages
    kept = max(GROUPS, MOST // (2 * len(forward) * n_stages))
    if 2 * len(forward) * n_micro <= MOST or groups <= kept:
        return timed(schedule, n_stages, n_micro, chunks, *seconds)
    few, many = (round(count * n_micro / groups) for count in (kept // 2 + 1, kept))       # groups as large as the whole step's
    fewer, more = (timed(schedule, n_stages, n, chunks, *seconds) for n in (few, many))
    further = (n_micro - many) / (many - few)

    def later(early: float, late: float) -> float:
        return late + further * (late - early)
    return PipelineTimes(later(fewer.total, more.total), list(map(later, fewer.stops, more.stops)),
                         [(later(a[0], b[0]), later(a[1], b[1])) for a, b in zip(fewer.last, more.last)])


def timed(schedule: Schedule, n_stages: int, n_micro: int, chunks: int, forward: Sequence[float], backward: Sequence[float],
          weight: Sequence[float], messages: Sequence[float], cores: float = inf, waiting: float = 0.0) -> PipelineTimes:
    """One pass over the flow."""
    found = flow_of(schedule, n_stages, n_micro, chunks)
    lasts = [*forward, *(backward if found.split else [b + w for b, w in zip(backward, weight)]), *weight]
    if cores < n_stages:
        return timed_in_turns(found, lasts, messages, n_stages, cores, waiting)
    stops: list[float] = []
    clock = [0.0] * n_stages
    for stage, kind, need, sent in found.steps:
        start = clock[stage]
        if need >= 0 and (arrival := stops[need] + messages[sent]) > start:
            start = arrival
        clock[stage] = stop = start + lasts[kind]
        stops.append(stop)
    last = [(stops[place] - lasts[found.steps[place][1]], stops[place]) if place >= 0 else (0.0, 0.0) for place in found.last]
    return PipelineTimes(max(clock), clock, last)


def timed_in_turns(found: Flow, lasts: Sequence[float], messages: Sequence[float], n_stages: int, cores: float,
                   waiting: float = 0.0) -> PipelineTimes:
    """The times of a flow whose stages share `cores` cores."""
    starts, stops = stops_in_turns(found.steps, lasts, messages, n_stages, cores, waiting)
    ends = [max((stop for (at, *_), stop in zip(found.steps, stops) if at == stage), default=0.0) for stage in range(n_stages)]
    return PipelineTimes(max(ends), ends, [(starts[place], stops[place]) if place >= 0 else (0.0, 0.0) for place in found.last])
