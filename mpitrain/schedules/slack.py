"""Lower clocks where a pipeline waits anyway: the same step for less energy (Perseus: Chung et al., arXiv:2312.06902).

Stages of a pipeline wait for each other: at its ends, and all but the slowest one in between. An action that others do not wait
for may run at a lower clock, where it takes longer and less energy. Which ones, and how much lower, `time_cost` says for the
whole front of time and energy; then each action gets a clock that its stage has, none slower than that allows, and what is left
of its slack is used up, the most joules first. A table (`clocks`) gives seconds and joules of each stage's actions at each clock.

While a stage waits it draws `idle_watts`; the energy of a step has that, too.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from mpitrain.schedules.clocks import COLUMNS, WORD, Clock, Table, refuse_incomplete
from mpitrain.schedules.pipeline import Action, Schedule
from mpitrain.schedules.pipeline_check import checked_programs, flow, splits_backward
from mpitrain.schedules.pipeline_simulate import Cost, Timeline, simulate_pipeline
from mpitrain.schedules.time_cost import Activity, Corner, Network, convex

SAME = 1e-9                                # steps that differ by less, relatively, take the same time


Place: TypeAlias = tuple[int, Action]                         # a stage and its action


@dataclass(frozen=True)
class Clocks:
    """A clock for each action of a step, and what the step takes at them, by the simulator. Joules have those of waiting."""

    chosen: dict[Place, Clock]
    timeline: Timeline
    joules: float

    @property
    def seconds(self) -> float:
        return self.timeline.total


@dataclass(frozen=True)
class Front:
    """The best clocks for a rising time of a step, from `fastest`, which take no longer than all actions at their fastest.

    `least` is a bound: no clocks, also none between two that the stages have, need fewer joules for the fastest step.
    """

    highest: Clocks
    fastest: Clocks
    points: list[Clocks]
    least: float


def write_clocks(path: Path, clocks: Clocks) -> None:
    """The clock of each action, in the order of its stage: a table's columns, and the micro-batch and chunk."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow((*COLUMNS, "micro_batch", "chunk"))
        for stage, spans in enumerate(clocks.timeline.spans):
            for action, _, _ in spans:
                clock = clocks.chosen[stage, action]
                writer.writerow((stage, WORD[action.kind], f"{clock.frequency:g}", repr(clock.seconds), repr(clock.joules),
                                 action.micro, action.chunk))


class Pipeline:
    """The actions of a step on `n_stages`, with the clocks that a table gives them. Messages between stages take `message`
    seconds each. ConfigError for a table without one of the stages or instructions."""

    def __init__(self, table: Table, schedule: Schedule, n_stages: int, n_micro: int, chunks: int = 1, *, message: float = 0.0,
                 idle_watts: float = 0.0):
        self.schedule, self.n_stages, self.n_micro, self.chunks = schedule, n_stages, n_micro, chunks
        self.idle_watts, self.cost = idle_watts, Cost(alpha=message)
        self.programs = checked_programs(schedule, n_stages, n_micro, chunks)
        self.options: dict[Place, list[Clock]] = {}
        split = any(map(splits_backward, self.programs))
        refuse_incomplete(table, n_stages * chunks, "FBW" if split else "FB")
        for stage, program in enumerate(self.programs):
            for action in program:
                clocks = table[action.chunk * n_stages + stage, action.kind]
                self.options[stage, action] = pareto(clocks, idle_watts)
        self.places = list(self.options)
        self._next = {place: {one: other.seconds for one, other in pairwise(clocks)} for place, clocks in self.options.items()}
        self._order = list(flow(self.programs, chunks))
        self.network, self._arcs = self._events(message)

    def _events(self, message: float) -> tuple[Network, range]:
        """Each action between two events of its own; waits between those of a stage, and messages between stages."""
        number = {place: index for index, place in enumerate(self.places)}
        last = 2 * len(number) + 1
        activities = [Activity(2 * n + 1, 2 * n + 2, convex([(clock.seconds, clock.joules - self.idle_watts * clock.seconds)
                                                             for clock in self.options[place]])) for place, n in number.items()]
        nothing = ((0.0, 0.0),)
        for stage, program in enumerate(self.programs):
            if program:
                activities += [Activity(0, 2 * number[stage, program[0]] + 1, nothing),
                               Activity(2 * number[stage, program[-1]] + 2, last, nothing)]
            activities += [Activity(2 * number[stage, one] + 2, 2 * number[stage, other] + 1, nothing)
                           for one, other in pairwise(program)]
        for stage, action, need in self._order:
            if need is not None:
                activities.append(Activity(2 * number[need] + 2, 2 * number[stage, action] + 1,
                                           ((message if self.n_stages > 1 else 0.0, 0.0),)))
        return Network(activities, last + 1), range(len(number))

    def simulated(self, chosen: Mapping[Place, Clock]) -> Clocks:
        """The step at these clocks, by the simulator."""
        timeline = simulate_pipeline(self.schedule, self.n_stages, self.n_micro, self.cost, self.chunks,
                                     each={place: clock.seconds for place, clock in chosen.items()})
        busy = sum(clock.seconds for clock in chosen.values())
        joules = sum(clock.joules for clock in chosen.values()) + self.idle_watts * (self.n_stages * timeline.total - busy)
        return Clocks(dict(chosen), timeline, joules)

    def highest(self) -> Clocks:
        """Every action at its fastest."""
        return self.simulated({place: clocks[0] for place, clocks in self.options.items()})

    def within(self, corner: Corner, seconds: float) -> Clocks:
        """Clocks that the stages have, of a step of at most `seconds`, from those of a corner of the front."""
        chosen = {place: cheapest(self.options[place], corner.seconds[index] * (1 + SAME), self.idle_watts)
                  for place, index in zip(self.places, self._arcs)}
        self._use_up(chosen, seconds * (1 + SAME))
        return self.simulated(chosen)

    def _use_up(self, chosen: dict[Place, Clock], seconds: float) -> None:
        """Lowers clocks further while a step of `seconds` has room for it, each time the one that saves most."""
        early, late = self._bounds(chosen, seconds)
        while True:
            best, gain = None, 0.0
            for place, clock in chosen.items():
                within, clocks = clock.seconds + late[place] - early[place], self.options[place]
                if within < self._next[place].get(clock, math.inf):           # most have no room for the next one
                    continue
                slower = cheapest(clocks, within, self.idle_watts)
                saved = worth(clock, self.idle_watts) - worth(slower, self.idle_watts)
                if saved > gain * (1 + SAME):
                    best, gain = (place, slower), saved
            if best is None:
                return
            chosen[best[0]] = best[1]
            early, late = self._bounds(chosen, seconds)

    def _bounds(self, chosen: Mapping[Place, Clock], seconds: float) -> tuple[dict[Place, float], dict[Place, float]]:
        """When each action can start at the earliest, and has to at the latest."""
        message, order = self.cost.alpha if self.n_stages > 1 else 0.0, self._order
        early, late = dict[Place, float](), dict[Place, float]()
        free = [0.0] * self.n_stages
        for stage, action, need in order:
            came = early[need] + chosen[need].seconds + message if need is not None else 0.0
            early[stage, action] = max(free[stage], came)
            free[stage] = early[stage, action] + chosen[stage, action].seconds
        until, asked = [seconds] * self.n_stages, dict[Place, float]()
        for stage, action, need in reversed(order):
            place = (stage, action)
            late[place] = min(until[stage], asked.get(place, seconds)) - chosen[place].seconds
            until[stage] = late[place]
            if need is not None:
                asked[need] = min(asked.get(need, seconds), late[place] - message)
        return early, late


def front_of(pipeline: Pipeline, points: int = 10) -> Front:
    """The front of a step's time and energy, at about so many times, evenly apart, and the end at which energy is least."""
    highest, corners = pipeline.highest(), list(pipeline.network.corners())
    corners.reverse()                                        # from the fastest on
    power = pipeline.idle_watts * pipeline.n_stages
    totals = [corner.cost + power * corner.total for corner in corners]
    end = min(range(len(corners)), key=lambda index: (totals[index], corners[index].total))
    first, last = corners[0].total, corners[end].total
    found = [pipeline.within(corners[0], max(corners[0].total, highest.seconds))]
    for number in range(1, points):
        wanted = first + (last - first) * number / (points - 1)
        corner = at_time(corners, wanted)
        clocks = pipeline.within(corner, wanted)
        if clocks.joules < found[-1].joules * (1 - SAME) and clocks.seconds > found[-1].seconds * (1 + SAME):
            found.append(clocks)
    return Front(highest, found[0], found, totals[0])


def at_time(corners: Sequence[Corner], wanted: float) -> Corner:
    """The point of the front, given by its corners from the fastest on, at a time: between two of them all is linear."""
    for one, other in pairwise(corners):
        if wanted <= other.total:
            share = (wanted - one.total) / (other.total - one.total)
            seconds = [a + (b - a) * share for a, b in zip(one.seconds, other.seconds)]
            return Corner(wanted, one.cost + (other.cost - one.cost) * share, seconds)
    return corners[-1]


def worth(clock: Clock, idle_watts: float) -> float:
    """What an action costs beyond the waiting in whose place it is."""
    return clock.joules - idle_watts * clock.seconds


def pareto(clocks: Sequence[Clock], idle_watts: float) -> list[Clock]:
    """The clocks that are the cheapest among those that are as fast, the fastest first."""
    kept: list[Clock] = []
    for clock in sorted(clocks, key=lambda clock: (clock.seconds, worth(clock, idle_watts))):
        if not kept or worth(clock, idle_watts) < worth(kept[-1], idle_watts):
            kept.append(clock)
    return kept


def cheapest(clocks: Sequence[Clock], seconds: float, idle_watts: float) -> Clock:
    """The slowest of Pareto clocks within so many seconds, which is the cheapest; the fastest if none is."""
    fit = [clock for clock in clocks if clock.seconds <= seconds]
    return fit[-1] if fit else clocks[0]


def lines_of(front: Front, pipeline: Pipeline, samples: int = 0, replicas: int = 1) -> Iterator[str]:
    """The front in words: `samples` of a step, for joules a sample, and the ranks that do each stage's work alike."""
    high, fast = front.highest, front.fastest
    saved = max(0.0, 1 - fast.joules / high.joules) if high.joules else 0.0
    bound = max(saved, 1 - front.least / high.joules if high.joules else 0.0)
    yield (f"{pipeline.n_stages} stages, {pipeline.n_micro} micro-batches: at the highest clocks a step takes "
           f"{high.seconds:.4g} s and {replicas * high.joules:.4g} J")
    yield (f"the same step at clocks by slack: {fast.seconds:.4g} s, {replicas * fast.joules:.4g} J, {saved:.1%} less (no clocks "
           f"could save more than {bound:.1%})")
    if not pipeline.idle_watts:
        yield "energy of computing alone: give the watts of a stage that waits, and waiting is counted, too"
    for stage, spans in enumerate(fast.timeline.spans):
        idle = [clocks.timeline.idle()[stage] for clocks in (high, fast)]
        ranges = []
        for kind in "FBW":
            used = sorted({fast.chosen[stage, span.action].frequency for span in spans if span.action.kind == kind})
            if used:
                ranges.append(f"{WORD[kind]} {used[0]:g}" + (f" to {used[-1]:g}" if len(used) > 1 else "") + " MHz")
        yield f"  stage {stage}: waits {idle[0]:.1%} of the step, then {idle[1]:.1%}; {', '.join(ranges)}"
    yield "  seconds     joules   of the highest clocks" + ("   J a sample" if samples else "")
    for clocks in front.points:
        each = f"{replicas * clocks.joules / samples:13.4g}" if samples else ""
        yield (f"  {clocks.seconds:<11.4g} {replicas * clocks.joules:<8.4g} {clocks.seconds / high.seconds:9.1%} of the time, "
               f"{clocks.joules / high.joules if high.joules else 1:.1%} of the energy{each}")
