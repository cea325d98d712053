"""Stages that share cores: against the timing without sharing, laws of work that nobody can beat, and cases by hand."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.schedules.pipeline import SCHEDULES
from mpitrain.schedules.pipeline_times import flow_of, pipeline_times, timed_in_turns
from mpitrain.schedules.pipeline_turns import waiting_weight

NAMES = ("gpipe", "1f1b", "zb_h1")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(1, 7), st.data())
def test_with_a_core_for_each_stage_nobody_waits_for_one(name: str, n_stages: int, n_micro: int, data: st.DataObject) -> None:
    seconds = [data.draw(st.lists(st.floats(0.01, 3.0), min_size=n_stages, max_size=n_stages)) for _ in range(4)]
    plain = pipeline_times(name, n_stages, n_micro, *seconds)
    found = flow_of(SCHEDULES[name], n_stages, n_micro, 1)
    forward, backward, weight, messages = seconds
    lasts = [*forward, *(backward if found.split else [b + w for b, w in zip(backward, weight)]), *weight]
    shared = timed_in_turns(found, lasts, messages, n_stages, float(n_stages))
    assert shared.total == pytest.approx(plain.total) and shared.stops == pytest.approx(plain.stops)
    for mine, theirs in zip(shared.last, plain.last, strict=True):
        assert mine == pytest.approx(theirs)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(1, 7), st.floats(0.5, 5.0))
def test_fewer_cores_take_longer_and_at_least_the_work_over_them(name: str, n_stages: int, n_micro: int, cores: float) -> None:
    forward, backward, weight = [1.0] * n_stages, [1.5] * n_stages, [0.5] * n_stages
    alone = pipeline_times(name, n_stages, n_micro, forward, backward, weight, [0.0] * n_stages).total
    found = pipeline_times(name, n_stages, n_micro, forward, backward, weight, [0.0] * n_stages, cores).total
    work = n_micro * 3.0 * n_stages
    assert max(alone, work / cores) - 1e-9 <= found <= max(alone, alone * n_stages / cores) + 1e-9


def test_two_stages_on_one_core_take_all_their_work_one_after_the_other() -> None:
    found = pipeline_times("gpipe", 2, 3, [1.0, 1.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0], 1.0)
    assert found.total == pytest.approx(2 * 3 * 3.0)


def test_two_of_three_that_work_at_a_time_have_a_core_each() -> None:
    """One micro-batch: never more than one stage is at work, so one core is enough for the time of three."""
    for cores in (1.0, 1.5, 3.0):
        found = pipeline_times("1f1b", 3, 1, [1.0] * 3, [2.0] * 3, [0.0] * 3, [0.25] * 3, cores)
        assert found.total == pytest.approx(9 + 4 * 0.25)


def test_a_stage_that_waits_weighs_a_part_of_one_that_computes() -> None:
    """One micro-batch passes three stages, of which one is at work at a time: its core is shared with two that wait."""
    for cores, waiting in ((1.0, 0.25), (1.0, 1.0), (1.5, 0.5), (2.0, 0.5)):
        slower = max(1.0, (1 + 2 * waiting) / cores)
        found = pipeline_times("1f1b", 3, 1, [1.0] * 3, [2.0] * 3, [0.0] * 3, [0.25] * 3, cores, waiting)
        assert found.total == pytest.approx(9 * slower + 4 * 0.25)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(1, 7), st.floats(0.5, 5.0), st.floats(0.0, 1.0))
def test_who_waits_costs_time_only_where_cores_are_short(name: str, n_stages: int, n_micro: int, cores: float,
                                                         waiting: float) -> None:
    seconds = [1.0] * n_stages, [1.5] * n_stages, [0.5] * n_stages, [0.1] * n_stages
    free, shared, most = (pipeline_times(name, n_stages, n_micro, *seconds, cores, each).total for each in (0.0, waiting, 1.0))
    assert free - 1e-9 <= shared <= most + 1e-9
    alone = pipeline_times(name, n_stages, n_micro, *seconds).total
    assert most <= alone * max(1.0, n_stages / cores) + 1e-9
    if cores >= n_stages:
        assert most == pytest.approx(alone)


@pytest.mark.parametrize(("ranks", "cores"), [(2, 1), (3, 2), (4, 2), (5, 2), (6, 3), (7, 3)])
def test_the_weight_of_who_waits_gives_the_mean_speed_over_all_placements(ranks: int, cores: int) -> None:
    """Each order of the ranks is dealt out to the cores in turn; the first `cores` ranks compute."""
    speeds = []
    for order in permutations(range(ranks)):
        on = {rank: place % cores for place, rank in enumerate(order)}
        speeds += [1 / sum(on[other] == on[rank] for other in range(cores)) for rank in range(cores)]
    mean = sum(speeds) / len(speeds)
    assert cores / (cores + waiting_weight(ranks, cores) * (ranks - cores)) == pytest.approx(mean)
    assert waiting_weight(cores, ranks) == 0.0
