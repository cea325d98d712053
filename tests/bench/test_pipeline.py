"""`mpitrain bench pipeline`: what it writes, that idle time is what actions leave of a step, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from standing import mpirun

from mpitrain.bench import command
from mpitrain.bench.pipeline import Contender, Spent, row
from mpitrain.errors import UsageError
from mpitrain.schedules.pipeline_simulate import bubble

SMALL = ("--blocks", "5", "--width", "8", "--rows", "6", "--micro-batches", "3", "--steps", "2")


def test_each_schedule_is_one_object_and_one_line(tmp_path: Path) -> None:
    result = mpirun(2, "-m", "mpitrain", "bench", "pipeline", *SMALL, "--json", "r.json", cwd=tmp_path)
    assert result.rc == 0 and result.error_lines == [], result.err
    records = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert [r["schedule"] for r in records] == ["gpipe", "1f1b", "interleaved", "zb_h1"]
    assert [r["chunks"] for r in records] == [1, 1, 2, 1] and len(result.out.splitlines()) == 2 + 4
    for r in records:
        assert (r["bench"], r["stages"], r["micro_batches"], r["steps"], r["message_bytes"]) == ("pipeline", 2, 3, 2, 4 * 8 * 6)
        assert 0 < r["seconds_low"] <= r["seconds"] and "versions" in r["machine"]
        assert 0 < r["idle_low"] <= r["idle"] <= r["idle_high"] < 1
        assert 0 < r["idle_by_formula"] < 1 and 0 < r["idle_simulated"] < 1
        assert [w > 0 for w in r["weight"]] == [r["schedule"] == "zb_h1"] * 2 and min(r["forward"] + r["backward"]) > 0
        f, b, w = (sum(r[name]) / 2 for name in ("forward", "backward", "weight"))
        assert r["idle_by_formula"] == bubble(r["schedule"], 2, 3, f, b, w, r["chunks"])
        assert r["speed_over_1f1b"] > 0
    assert records[1]["speed_over_1f1b"] == 1


def step(seconds: float, busy: tuple[float, float], forward: float) -> dict[str, Any]:
    return {"step": seconds, "stages": [{"busy": b, "F": forward, "B": 2 * forward, "W": 0.0, "messages": 0.1, "count": 0.0,
                                         "update": 0.5} for b in busy]}


def test_idle_is_what_actions_leave_of_a_step_on_all_stages() -> None:
    contender: Any = object.__new__(Contender)
    contender.name, contender.n_stages, contender.n_micro, contender.chunks = "1f1b", 2, 4, 1
    contender.found = [step(9.0, (1.0, 1.0), 9.0), step(10.0, (6.0, 8.0), 0.5), step(10.0, (7.0, 9.0), 0.5),
                       step(20.0, (9.0, 9.0), 0.5)]
    found = contender.summary(3, 0.0, 0.0, 100)
    assert found["seconds"] == 10.0 and found["idle"] == pytest.approx(0.3), "the first step is none of the last three"
    assert found["forward"] == [0.5, 0.5] and found["backward"] == [1.0, 1.0]
    assert found["idle_by_formula"] == pytest.approx(0.2) == found["idle_simulated"]


def test_spans_of_actions_are_busy_and_spans_of_waits_are_not() -> None:
    spent = Spent()
    for span, name in (("compute", "forward 0"), ("wait", "wait for B0"), ("compute", "backward 0"),
                      ("compute", "weight gradient 1"), ("compute", "exchange of the count")):
        with spent(span, name):
            pass
    assert {kind: len(of) for kind, of in spent.actions.items()} == {"F": 1, "B": 1, "W": 1}
    assert min(spent.waits.values()) > 0 and spent.busy == pytest.approx(sum(of[0] for of in spent.actions.values()))


@pytest.mark.parametrize(("changes", "words"), [
    ({"schedules": "1f1b,gpip"}, r'--schedules knows no "gpip" \(did you mean "gpipe"\?\); choose from gpipe, 1f1b'),
    ({"chunks": 1}, "--chunks must be at least 2"),
    ({"micro_batches": 0}, "--micro-batches must be at least 1"), ({"width": 0}, "--width must be at least 1")])
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], words: str) -> None:
    flags: dict[str, Any] = {"schedules": "1f1b", "micro_batches": 4, "chunks": 2, "blocks": 8, "width": 8, "rows": 8, "steps": 1}
    with pytest.raises(UsageError, match=words):
        command.pipeline(**{**flags, **changes})


def test_columns_of_the_table_stay_apart_whatever_the_times() -> None:
    record = {"schedule": "interleaved", "seconds": 0.0099999, "waited_for_messages": [0.0], "waited_for_count": [0.0],
              "forward": [0.0099999] * 2, "backward": [0.0099999] * 2, "weight": [0.0, 0.0], "idle": 1.0, "idle_simulated": 1.0,
              "idle_by_formula": 1.0, "update": [0.0]}
    assert row(record).split()[:9] == ["interleaved", "9999.9", "us", "9999.9", "us", "9999.9", "us", "-", "100.0%"]
