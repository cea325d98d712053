"""A drawn pipeline shows each stage's actions where they take place, and fits the width of a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import ConfigError
from mpitrain.schedules.pipeline import SCHEDULES, one_f_one_b, zb_h1
from mpitrain.schedules.pipeline_draw import describe, draw


def test_a_line_is_a_stage_and_a_column_a_unit_of_time() -> None:
    assert list(draw(one_f_one_b, 2, 2)) == ["time     0  1  2  3  4  5  6  7  8",
                                             "stage 0  F0 F1 .  .  B0--- .  B1---",
                                             "stage 1  .  F0 B0--- F1 B1--- .  ."]


@pytest.mark.parametrize("width", [20, 33, 80])
@pytest.mark.parametrize(("name", "n_stages", "n_micro", "chunks"),
                         [("zb_h1", 3, 12, 1), ("interleaved", 2, 5, 2), ("gpipe", 4, 7, 1)])
def test_long_drawings_go_on_below_and_say_the_same(name: str, n_stages: int, n_micro: int, chunks: int, width: int) -> None:
    whole = list(draw(SCHEDULES[name], n_stages, n_micro, chunks, width=10_000))
    cut = list(draw(SCHEDULES[name], n_stages, n_micro, chunks, width=width))
    assert len(whole) == n_stages + 1 and len(cut) > len(whole) and max(map(len, cut)) <= width
    margin = len("stage 0  ")
    for i, line in enumerate(whole):
        pieces = cut[i::n_stages + 1]
        assert "".join(piece[margin:].replace(" ", "") for piece in pieces) == line[margin:].replace(" ", "")
        assert all(piece.startswith(line[:margin].rstrip()) for piece in pieces)


def test_wide_numbers_have_room() -> None:
    head, *stages = draw(zb_h1, 2, 120, width=10_000)
    assert head.split()[:4] == ["time", "0", "1", "2"] and stages[0].endswith("B119 W119")
    assert stages[0].index("F119") == head.index(" 356 ") + 1            # forward i > 1 takes unit 3 i - 1


def test_times_that_are_wider_than_a_column_are_left_out() -> None:
    head = next(draw(SCHEDULES["gpipe"], 40, 2, width=10_000))
    assert head.split()[1:] == [str(time) for time in range(0, 123, 2)]


def test_a_schedule_is_described_with_its_idle_share_and_memory(tmp_path: Path) -> None:
    assert list(describe("zb_h1", 2, 4, width=100)) == [
        "schedule zb_h1: 2 stages, 4 micro-batches",
        "  idle 7.7% by formula, 7.7% simulated (a forward as long as an input or a weight gradient)",
        "  live activations at most, in micro-batches by stage: 2 2",
        "  time     0  1  2  3  4  5  6  7  8  9  10 11 12",
        "  stage 0  F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3",
        "  stage 1  .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3"]
    (tmp_path / "own.py").write_text("from mpitrain.schedules.pipeline import gpipe\n")
    own = list(describe("own.py:gpipe", 2, 1, folder=tmp_path))
    assert own[0] == "schedule own.py:gpipe: 2 stages, 1 micro-batch"
    assert own[1].startswith("  idle 50.0% simulated")
    assert list(describe("interleaved", 2, 4, 2))[2] == "  live activations at most, in chunks of micro-batches by stage: 5 3"


def test_only_the_beginning_of_a_huge_drawing_is_described() -> None:
    lines = list(describe("1f1b", 8, 64, width=80))
    assert len(lines) == 3 + 5 * 9 + 1 and lines[-1] == "  ... until time 213" and max(map(len, lines[3:])) <= 80


def test_what_cannot_run_is_not_described() -> None:
    with pytest.raises(ConfigError, match='"1f1b" with n_stages=2, n_micro=2, chunks=2: it knows one chunk a stage, not 2'):
        list(describe("1f1b", 2, 2, 2))
