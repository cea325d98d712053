"""Pipeline schedules run every micro-batch once, in order, and hold as many activations as they promise."""

from __future__ import annotations

import pytest

from mpitrain.errors import ConfigError
from mpitrain.schedules.pipeline import SCHEDULES, Action, forward_only, gpipe, interleaved, one_f_one_b, zb_h1
from mpitrain.schedules.pipeline_check import actions_of, check_pipeline
from mpitrain.schedules.pipeline_draw import draw

NAMES = [(name, chunks) for name in SCHEDULES for chunks in ((2, 3) if name == "interleaved" else (1,))]
MOST = {"gpipe": lambda stage, p, m, chunks: m,
        "1f1b": lambda stage, p, m, chunks: min(m, p - stage),
        "zb_h1": lambda stage, p, m, chunks: min(m, p)}


def peak_of_interleaved(stage: int, p: int, m: int, chunks: int) -> int:
    """Narayanan's where p divides m; with fewer than p all wait for their backwards; else groups have up to `largest`."""
    largest = -(-m // max(1, m // p))
    return m * chunks if m < p else min(m * chunks, (chunks - 1) * largest + 2 * (p - stage) - 1)


@pytest.mark.parametrize(("name", "chunks"), NAMES)
@pytest.mark.parametrize("n_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n_micro", [0, 1, 2, 3, 4, 9, 17])
def test_every_schedule_ends_in_order_with_the_memory_it_promises(name: str, chunks: int, n_stages: int, n_micro: int) -> None:
    peak = check_pipeline(SCHEDULES[name], n_stages, n_micro, chunks)
    most = MOST.get(name, peak_of_interleaved)
    assert peak == [most(stage, n_stages, n_micro, chunks) for stage in range(n_stages)]
    for stage in range(n_stages):
        actions = list(actions_of(SCHEDULES[name], stage, n_stages, n_micro, chunks))
        for kind in "FBW" if name == "zb_h1" else "FB":
            for chunk in range(chunks):
                assert [a.micro for a in actions if (a.kind, a.chunk) == (kind, chunk)] == list(range(n_micro))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("n_stages", "n_micro"), [(1, 2), (2, 0), (3, 1), (4, 9)])
def test_evaluation_keeps_nothing(n_stages: int, n_micro: int, chunks: int) -> None:
    assert check_pipeline(forward_only, n_stages, n_micro, chunks, training=False) == [min(1, n_micro)] * n_stages


def text(schedule, *arguments: int, **keywords: int) -> str:
    return " ".join(map(str, schedule(*arguments, **keywords)))


def test_the_order_of_1f1b_is_that_of_the_paper() -> None:
    assert text(one_f_one_b, 0, 2, 3) == "F0 F1 B0 F2 B1 B2"
    assert text(one_f_one_b, 1, 2, 3) == "F0 B0 F1 B1 F2 B2"
    assert text(gpipe, 0, 1, 2) == "F0 F1 B0 B1"


def test_the_order_of_zb_h1_is_that_of_the_paper() -> None:
    """The figure of ZB-H1 with 4 stages and 8 micro-batches, counted from 0."""
    assert text(zb_h1, 0, 4, 8) == ("F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7")
    assert text(zb_h1, 3, 4, 8) == ("F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7")


def test_the_order_of_interleaved_1f1b_is_that_of_the_paper() -> None:
    """The figure with 4 stages, 8 micro-batches and 2 chunks, counted from 0: how the last and the first stage begin."""
    assert text(interleaved, 3, 4, 8).startswith("F0 F1 F2 F3 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4 B0 F5 B1")
    assert text(interleaved, 0, 4, 8).startswith("F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 B0.1 F7 B1.1 F4.1 B2.1")


def test_one_stage_is_gradient_accumulation() -> None:
    assert text(one_f_one_b, 0, 1, 2) == "F0 B0 F1 B1"
    assert text(zb_h1, 0, 1, 2) == "F0 B0 W0 F1 B1 W1"
    assert text(forward_only, 0, 1, 2) == "F0 F1"
    assert check_pipeline(interleaved, 1, 5, chunks=3) == [3]                # the chunks of one micro-batch


@pytest.mark.parametrize(("schedule", "n_micro", "chunks"), [(gpipe, 3, 1), (one_f_one_b, 3, 1), (zb_h1, 3, 1),
                                                             (interleaved, 2, 2), (forward_only, 3, 1)])
def test_the_pictures_of_the_docstrings_are_drawings(schedule, n_micro: int, chunks: int) -> None:
    drawn = list(draw(schedule, 2, n_micro, chunks, width=120, training=schedule is not forward_only))[1:]
    assert [line.strip() for line in schedule.__doc__.splitlines() if line.strip().startswith("stage ")] == drawn


def test_an_action_names_its_chunk_beside_the_first() -> None:
    assert [str(Action("F", 3)), str(Action("W", 3, 2))] == ["F3", "W3.2"]


def test_interleaving_one_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match='^interleaved 1F1B needs at least 2 chunks a stage, found 1; set mesh.chunks = 2'):
        list(interleaved(0, 2, 2, chunks=1))
