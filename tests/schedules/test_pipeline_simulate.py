"""Simulated pipelines idle as the papers' formulas say, and where there is no formula as the longest way through them."""

from __future__ import annotations

import random
from functools import cache

import pytest

from mpitrain.errors import ConfigError
from mpitrain.schedules.pipeline import SCHEDULES, Schedule, forward_only, one_f_one_b
from mpitrain.schedules.pipeline_check import actions_of
from mpitrain.schedules.pipeline_simulate import Cost, bubble, simulate_pipeline
from mpitrain.schedules.steps import ScheduleError

NAMES = [(name, chunks) for name in SCHEDULES for chunks in ((2, 3) if name == "interleaved" else (1,))]
COSTS = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (3, 2, 5), (5, 2, 3), (2, 5, 0), (0.7, 0.9, 0.4)]


@pytest.mark.parametrize(("name", "chunks"), NAMES)
@pytest.mark.parametrize("n_stages", [1, 2, 3, 5])
def test_stages_idle_as_the_formula_says_at_any_cost(name: str, chunks: int, n_stages: int) -> None:
    for n_micro in (0, 1, 2, 4, 5, 8, 11):
        for costs in COSTS:
            timeline = simulate_pipeline(SCHEDULES[name], n_stages, n_micro, Cost(*costs), chunks)
            assert timeline.idle_fraction() == pytest.approx(bubble(name, n_stages, n_micro, *costs, chunks=chunks), abs=1e-12)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("n_stages", "n_micro"), [(1, 3), (2, 5), (3, 2), (4, 9)])
def test_evaluation_idles_as_the_formula_says(n_stages: int, n_micro: int, chunks: int) -> None:
    timeline = simulate_pipeline(forward_only, n_stages, n_micro, Cost(2.0), chunks, training=False)
    assert timeline.idle_fraction() == pytest.approx(bubble("forward_only", n_stages, n_micro, 2.0, chunks=chunks), abs=1e-12)


def test_formulas_are_those_of_the_papers() -> None:
    """Idle time by the time of the micro-batches themselves: (p - 1) / m, (p - 1) / (v m), (p - 1) / (3 m)."""
    for name, chunks, paper in (("gpipe", 1, 3 / 8), ("1f1b", 1, 3 / 8), ("interleaved", 2, 3 / 16), ("zb_h1", 1, 3 / 24)):
        share = bubble(name, 4, 8, chunks=chunks)
        assert share / (1 - share) == pytest.approx(paper)
    share = bubble("zb_h1", 4, 8, 5, 4, 3)                                  # (p - 1) (F + B - W) of Qi et al.
    assert share / (1 - share) == pytest.approx(3 * (5 + 4 - 3) / (8 * 12))


@pytest.mark.parametrize(("n_stages", "n_micro"), [(16, 100), pytest.param(64, 512, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb_h1", 1), ("interleaved", 2)])
def test_large_pipelines_idle_as_the_formula_says(name: str, chunks: int, n_stages: int, n_micro: int) -> None:
    timeline = simulate_pipeline(SCHEDULES[name], n_stages, n_micro, Cost(1, 1.2, 0.9), chunks)
    assert timeline.idle_fraction() == pytest.approx(bubble(name, n_stages, n_micro, 1, 1.2, 0.9, chunks), abs=1e-9)


def longest_way(schedule: Schedule, n_stages: int, n_micro: int, cost: Cost, chunks: int) -> float:
    """The time of the last action, asked backwards: when the one before it on its stage, and the message to it, are there."""
    programs = [list(actions_of(schedule, stage, n_stages, n_micro, chunks)) for stage in range(n_stages)]
    split = any(action.kind == "W" for action in programs[0])
    place = {(action.kind, action.micro, action.chunk * n_stages + stage): (stage, i)
             for stage, program in enumerate(programs) for i, action in enumerate(program)}

    @cache
    def stop(stage: int, i: int) -> float:
        if i < 0:
            return 0.0
        kind, micro, chunk = programs[stage][i]
        seconds = {"F": cost.forward[stage], "W": cost.weight[stage],
                   "B": cost.backward[stage] + (0 if split else cost.weight[stage])}[kind] / chunks
        at = chunk * n_stages + stage
        before = place.get((kind, micro, {"F": at - 1, "B": at + 1}.get(kind)))
        sender = before[0] if kind == "F" and before else stage
        message = cost.alpha + cost.beta * cost.message_bytes[sender] if n_stages > 1 else 0.0
        return max(stop(stage, i - 1), stop(*before) + message if before else 0.0) + seconds

    return max(stop(stage, len(program) - 1) for stage, program in enumerate(programs))


@pytest.mark.parametrize(("name", "chunks"), NAMES)
@pytest.mark.parametrize(("n_stages", "n_micro"), [(1, 3), (2, 4), (4, 5)])
def test_unequal_stages_and_messages_take_the_longest_way(name: str, chunks: int, n_stages: int, n_micro: int) -> None:
    draw = random.Random(f"{name} {n_stages}")
    numbers = [[draw.uniform(0.5, 2) for _ in range(n_stages)] for _ in range(4)]
    cost = Cost(*numbers[:3], alpha=0.3, beta=0.5, message_bytes=numbers[3])
    timeline = simulate_pipeline(SCHEDULES[name], n_stages, n_micro, cost, chunks)
    assert timeline.total == pytest.approx(longest_way(SCHEDULES[name], n_stages, n_micro, cost, chunks))
    for stage, spans in enumerate(timeline.spans):
        assert [span.action for span in spans] == list(actions_of(SCHEDULES[name], stage, n_stages, n_micro, chunks))
        assert all(one.stop <= next.start for one, next in zip(spans, spans[1:]))
    assert timeline.idle_fraction() == pytest.approx(1 - n_micro * sum(map(sum, numbers[:3])) / (n_stages * timeline.total))


def test_two_stages_and_a_message_by_hand() -> None:
    """F 0..1, message 0.5 + 2 * 0.25, F on stage 1 at 2..3, its B 3..6, the gradient back at 7, B on stage 0 at 7..10."""
    timeline = simulate_pipeline(one_f_one_b, 2, 1, Cost(1, 2, 1, alpha=0.5, beta=0.25, message_bytes=2))
    assert [[tuple(span)[1:] for span in stage] for stage in timeline.spans] == [[(0, 1), (7, 10)], [(2, 3), (3, 6)]]
    assert (timeline.total, timeline.idle_fraction(), timeline.idle()) == (10, pytest.approx(0.6), [pytest.approx(0.6)] * 2)


def test_a_number_for_each_virtual_stage_is_its_own() -> None:
    shared = simulate_pipeline(SCHEDULES["interleaved"], 2, 4, Cost([2, 4], [2, 4], [2, 4]), 2)
    each = simulate_pipeline(SCHEDULES["interleaved"], 2, 4, Cost([1, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 2]), 2)
    other = simulate_pipeline(SCHEDULES["interleaved"], 2, 4, Cost([1, 2, 1, 3], [1, 2, 1, 2], [1, 2, 1, 2]), 2)
    assert shared == each and other.total > each.total


def test_wrong_schedules_and_costs_are_refused() -> None:
    with pytest.raises(ScheduleError, match="^stage 0 of 2 runs F0; it should run forward and backward"):
        simulate_pipeline(forward_only, 2, 1)
    for cost in (Cost(-1), Cost(alpha=float("nan")), Cost(message_bytes=[1, float("inf")])):
        with pytest.raises(ConfigError, match=r"^the cost \w+ of a pipeline is \S+; it should be a number, 0 or more$"):
            simulate_pipeline(one_f_one_b, 2, 1, cost)
    with pytest.raises(ConfigError, match="^the cost weight has 3 numbers, and there are 2 stages of 1 chunks; give one"):
        simulate_pipeline(one_f_one_b, 2, 1, Cost(1, 1, [1, 1, 1]))
    with pytest.raises(ConfigError, match="has 3 numbers, and there are 2 stages of 2 chunks; give one number, or 2 or 4$"):
        simulate_pipeline(SCHEDULES["interleaved"], 2, 2, Cost([1, 1, 1]), 2)


def test_formulas_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'^there is no formula for pipeline schedule "zbh1" \(did you mean "zb_h1"\?\)$'):
        bubble("zbh1", 2, 2)
    for name, numbers, words in (("1f1b", (2, 2, 1, 1, 1, 2), "1"), ("interleaved", (2, 2), "at least 2"),
                                 ("forward_only", (0, 2), "at least 1"), ("gpipe", (2, -1), "1")):
        with pytest.raises(ConfigError, match=rf'^the formula of .* "{name}" wants 1 stage .* and {words} chunks a stage'):
            bubble(name, *numbers)
    with pytest.raises(ConfigError, match="^the cost weight of a pipeline is -1; it should be"):
        bubble("gpipe", 2, 2, 1, 1, -1)
