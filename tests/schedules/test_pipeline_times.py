"""Pipelines timed over a flow that is found once take the times of `simulate_pipeline`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from mpitrain.errors import ConfigError
from mpitrain.schedules import pipeline_times as fast
from mpitrain.schedules.pipeline import SCHEDULES, Action
from mpitrain.schedules.pipeline_simulate import Cost, simulate_pipeline
from mpitrain.schedules.pipeline_times import PipelineTimes, pipeline_times
from mpitrain.schedules.steps import ScheduleError


def seconds(n: int, seed: int) -> list[list[float]]:
    """Forward, backward, weight and message of each virtual stage, all unlike."""
    drawn = random.Random(seed)
    return [[drawn.uniform(low, high) for _ in range(n)] for low, high in ((1, 1.3), (1, 1.3), (0.8, 1), (0, 0.3))]


def timed(name: str, p: int, m: int, given: list[list[float]]) -> PipelineTimes:
    return pipeline_times(name, p, m, *given)


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_times_are_those_of_the_simulation(name: str, p: int) -> None:
    chunks = 2 if name == "interleaved" else 1
    for m in (1, 2, 5, 8, 13, 40):
        forward, backward, weight, messages = given = seconds(p * chunks, m)
        line = simulate_pipeline(SCHEDULES[name], p, m, Cost(forward, backward, weight, 0.0, 1.0, messages), chunks)
        found = timed(name, p, m, given)
        assert found.total == pytest.approx(line.total, rel=1e-12)
        assert found.stops == pytest.approx([stage[-1].stop for stage in line.spans], rel=1e-12)
        kind = "W" if name == "zb_h1" else "B"
        for stage, spans in enumerate(line.spans):
            for span in spans:
                if span.action.kind == kind and span.action.micro == m - 1:
                    assert found.last[span.action.chunk * p + stage] == pytest.approx((span.start, span.stop), rel=1e-12)


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize(("p", "m"), [(3, 4001), (8, 1003), (24, 400)])
def test_long_steps_follow_from_short_ones(name: str, p: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    n = p * (2 if name == "interleaved" else 1)
    for given, error in ((seconds(n, p), 1e-2), ([[1.0] * n, [1.1] * n, [0.9] * n, [0.2] * n], 1e-4)):
        monkeypatch.setattr(fast, "MOST", 12_000)
        found = timed(name, p, m, given)
        assert m * p * 2 > fast.MOST                          # so the short ones were timed
        monkeypatch.setattr(fast, "MOST", 10**9)
        whole = timed(name, p, m, given)
        assert found.total == pytest.approx(whole.total, rel=error)
        assert found.stops == pytest.approx(whole.stops, rel=5 * error)


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    def circular(stage: int, n_stages: int, n_micro: int) -> Iterator[Action]:
        order = range(n_micro) if stage else reversed(range(n_micro))
        yield from (Action("F", micro) for micro in sorted(order))
        yield from (Action("B", micro) for micro in range(n_micro))

    def deadlocked(stage: int, n_stages: int, n_micro: int) -> Iterator[Action]:
        yield Action("F", 0)
        if stage == 0:
            yield Action("B", 0)
            yield from (Action("F", 1), Action("B", 1))
        else:
            yield from (Action("F", 1), Action("B", 0), Action("B", 1))
    assert fast.flow_of(circular, 2, 3, 1).steps              # it is one that can be
    with pytest.raises(ScheduleError, match="deadlock: stage 0 waits in B0 for stage 1's B0"):
        pipeline_times(deadlocked, 2, 2, [1, 1], [1, 1], [0, 0], [0, 0])
    for name, chunks, said in (("1f1b", 2, "it knows one chunk a stage, not 2"), ("interleaved", 1, "at least 2 chunks a stage")):
        with pytest.raises(ConfigError, match=said):
            pipeline_times(name, 2, 4, *[[1.0] * 2 * chunks] * 4)
    with pytest.raises(ConfigError, match="unknown pipeline schedule"):
        pipeline_times("1b1f", 2, 4, *[[1.0] * 2] * 4)
