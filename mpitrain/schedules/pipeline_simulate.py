"""Times a pipeline schedule on a model of its stages, and says by formula how long they idle.

The model: a stage does one action at a time, in the order of its program, each as soon as the one before has ended and its
message is there. A message takes alpha + beta s seconds for s bytes, from the end of the action that makes it; it needs no
processor, and messages do not hinder each other. So a schedule's time is a lower bound of the real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from mpitrain.errors import ConfigError, nearest
from mpitrain.schedules.pipeline import Action, Schedule
from mpitrain.schedules.pipeline_check import checked_programs, flow, splits_backward

FORMULAS = ("gpipe", "1f1b", "zb_h1", "interleaved", "forward_only")


class Cost(NamedTuple):
    """Seconds of one micro-batch on one stage, and of a message: `alpha` seconds each and `beta` seconds a byte.

    `backward` is the gradient of the input alone and `weight` that of the parameters; where a schedule has no W, its B takes
    both. A number holds for all stages. A sequence has one for each stage, whose chunks share it, or, of length n_stages *
    chunks, one for each virtual stage. `message_bytes` is the size of the activation that leaves a (virtual) stage and of
    its gradient, which comes back.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 1.0
    weight: float | Sequence[float] = 1.0
    alpha: float = 0.0
    beta: float = 0.0
    message_bytes: float | Sequence[float] = 0.0


class Span(NamedTuple):
    """An action, and when it starts and stops, in seconds."""

    action: Action
    start: float
    stop: float


class Timeline(NamedTuple):
    """What each stage does when; all start at 0, and the last ends at `total`."""

    spans: list[list[Span]]
    total: float

    def idle(self) -> list[float]:
        """The share of the total in which each stage does nothing."""
        return [1 - sum(span.stop - span.start for span in stage) / self.total if self.total else 0.0 for stage in self.spans]

    def idle_fraction(self) -> float:
        """1 - busy / (n_stages * total): the mean of `idle`."""
        return sum(self.idle()) / len(self.spans)


def simulate_pipeline(schedule: Schedule, n_stages: int, n_micro: int, cost: Cost | None = None, chunks: int = 1, *,
                      training: bool = True, each: Mapping[tuple[int, Action], float] | None = None) -> Timeline:
    """When each stage does what, at `cost` (by default F = B = W = 1 and messages are free); `each` has the seconds of every
    action of a stage, in place of the cost's. ScheduleError for a schedule that `check_pipeline` refuses, ConfigError for a cost
    that cannot be."""
    programs = checked_programs(schedule, n_stages, n_micro, chunks, training=training)
    seconds, messages = tables(cost if cost is not None else Cost(), n_stages, chunks,
                               split=any(splits_backward(program) for program in programs))
    spans: list[list[Span]] = [[] for _ in programs]
    stops: list[dict[Action, float]] = [{} for _ in programs]
    clock = [0.0] * n_stages
    for stage, action, need in flow(programs, chunks):
        kind, _, chunk = action
        virtual = chunk * n_stages + stage
        start = clock[stage]
        if need is not None:
            arrival = stops[need[0]][need[1]] + messages[virtual - 1 if kind == "F" else virtual]
            if arrival > start:
                start = arrival
        clock[stage] = stops[stage][action] = stop = start + (seconds[kind][virtual] if each is None else each[stage, action])
        spans[stage].append(Span(action, start, stop))
    return Timeline(spans, max(clock))


def tables(cost: Cost, n_stages: int, chunks: int, *, split: bool) -> tuple[dict[str, list[float]], list[float]]:
    """The seconds of F, B and W of each virtual stage, and of its message to the next one. ConfigError for impossible costs."""
    forward = per_stage(cost.forward, "forward", n_stages, chunks)
    backward = per_stage(cost.backward, "backward", n_stages, chunks)
    weight = per_stage(cost.weight, "weight", n_stages, chunks)
    sizes = per_stage(cost.message_bytes, "message_bytes", n_stages, chunks, shared=False)
    for name, value in (("alpha", cost.alpha), ("beta", cost.beta)):
        check_number(name, value)
    messages = [cost.alpha + cost.beta * size if n_stages > 1 else 0.0 for size in sizes]
    if not split:
        backward = [b + w for b, w in zip(backward, weight)]
    return {"F": forward, "B": backward, "W": weight}, messages


def per_stage(value: float | Sequence[float], name: str, n_stages: int, chunks: int, *, shared: bool = True) -> list[float]:
    """One number for each virtual stage; the chunks of a stage have the same, or a part each of what they share."""
    numbers = [value] * n_stages if isinstance(value, (int, float)) else list(value)
    if len(numbers) not in (n_stages, n_stages * chunks):
        of_chunks = f" or {n_stages * chunks}" if chunks > 1 else ""
        raise ConfigError(f"the cost {name} has {len(numbers)} numbers, and there are {n_stages} stages of {chunks} chunks; give "
                          f"one number, or {n_stages}{of_chunks}")
    for number in numbers:
        check_number(name, number)
    if len(numbers) < n_stages * chunks:
        numbers = [number / chunks if shared else number for number in numbers] * chunks
    return numbers


def check_number(name: str, value: float) -> None:
    if not 0 <= value < inf:
        raise ConfigError(f"the cost {name} of a pipeline is {value}; it should be a number, 0 or more")


def bubble(name: str, n_stages: int, n_micro: int, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0,
           chunks: int = 1) -> float:
    """The share of time that stages idle under a built-in schedule or "forward_only", by formula. ConfigError for another.

    Costs are those of `Cost`: F, B and W seconds of a micro-batch on a stage, alike on all p stages, and messages are free.
    Stages idle so many seconds beside their m micro-batches:

        gpipe, 1f1b     (p - 1) (F + B + W)                                    Narayanan et al., 2019 and 2021
        zb_h1           (p - 1) (F + B) - (min(m, p) - 1) min(F, B, W)
        interleaved     (p - 1) (F + B + W) / chunks                           for m >= p
        forward_only    (p - 1) F / chunks                                     for m >= p

    For m >= p and W <= min(F, B) that of ZB-H1 is (p - 1) (F + B - W), which Qi et al. (2023) give. Fewer micro-batches than
    stages leave (p - m) (chunks - 1) / chunks of a micro-batch more to the last two. Each is exact in this model, at any p,
    m, F, B and W.
    """
    if name not in FORMULAS:
        raise ConfigError(f'there is no formula for pipeline schedule "{name}"{nearest(name, FORMULAS)}')
    fewest, most, words = {"interleaved": (2, inf, "at least 2"), "forward_only": (1, inf, "at least 1")}.get(name, (1, 1, "1"))
    if n_stages < 1 or n_micro < 0 or not fewest <= chunks <= most:
        raise ConfigError(f'the formula of pipeline schedule "{name}" wants 1 stage or more, 0 micro-batches or more and '
                          f"{words} chunks a stage, found {n_stages}, {n_micro} and {chunks}")
    for what, seconds in (("forward", forward), ("backward", backward), ("weight", weight)):
        check_number(what, seconds)
    work = forward if name == "forward_only" else forward + backward + weight
    if name == "zb_h1":
        idle = (n_stages - 1) * (forward + backward) - (min(n_micro, n_stages) - 1) * min(forward, backward, weight)
    else:
        idle = (n_stages - 1 + (chunks - 1) * max(0, n_stages - n_micro)) * work / chunks
    return idle / (n_micro * work + idle) if n_micro and idle else 0.0
