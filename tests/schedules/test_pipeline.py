"""Pipeline schedules run every micro-batch once, end, and hold as many activations as they promise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpitrain.schedules.check import ScheduleError
from mpitrain.schedules.pipeline import SCHEDULES, Action, check_pipeline, gpipe, one_f_one_b


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("n_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n_micro", [0, 1, 2, 3, 4, 9])
def test_every_schedule_ends_and_accumulates_in_order(name: str, n_stages: int, n_micro: int) -> None:
    peak = check_pipeline(SCHEDULES[name], n_stages, n_micro)
    most = [n_micro] * n_stages if name == "gpipe" else [min(n_micro, n_stages - stage) for stage in range(n_stages)]
    assert peak == most
    for stage in range(n_stages):
        backwards = [action.micro for action in SCHEDULES[name](stage, n_stages, n_micro) if action.kind == "B"]
        assert backwards == list(range(n_micro))


def test_the_order_of_1f1b_is_that_of_the_paper() -> None:
    assert " ".join(map(str, one_f_one_b(0, 2, 3))) == "F0 F1 B0 F2 B1 B2"
    assert " ".join(map(str, one_f_one_b(1, 2, 3))) == "F0 B0 F1 B1 F2 B2"
    assert " ".join(map(str, gpipe(0, 1, 2))) == "F0 F1 B0 B1"


def test_one_stage_of_1f1b_is_gradient_accumulation() -> None:
    assert list(one_f_one_b(0, 1, 2)) == [Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)]


def eager_first_stage(stage: int, n_stages: int, n_micro: int) -> Iterator[Action]:
    """The first stage wants a gradient back before it has sent what the others need for it."""
    yield from one_f_one_b(n_stages - 1, n_stages, n_micro) if stage == 0 else gpipe(stage, n_stages, n_micro)


def forgets_one(stage: int, n_stages: int, n_micro: int) -> Iterator[Action]:
    yield from gpipe(stage, n_stages, n_micro - 1)


def test_a_schedule_that_waits_in_a_circle_is_found() -> None:
    with pytest.raises(ScheduleError, match="^deadlock: stage 0 waits before B0; stage 1 waits before F1$"):
        check_pipeline(eager_first_stage, 2, 2)


def test_a_schedule_that_forgets_a_micro_batch_is_found() -> None:
    with pytest.raises(ScheduleError, match="^stage 0 of 1 runs F0 B0; it should run forward and backward of each of 2 micro-"):
        check_pipeline(forgets_one, 1, 2)
