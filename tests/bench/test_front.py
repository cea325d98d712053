"""benchmarks/front.py: which models nothing else beats, and the picture that says so."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from launch import ROOT

from mpitrain.errors import MissingError


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, without the variables that it sets for the processes that it measures."""
    monkeypatch.setitem(sys.modules, "pinned", ModuleType("pinned"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("front")


def made(what: str, accuracy: float, step_s: float, step_j: float | None = None) -> dict[str, Any]:
    return {"what": what, "accuracy": accuracy, "step_s": step_s, "sample_s": step_s / 200, "step_j": step_j, "parameters": 1000,
            "multiply_adds": 2_500_000, "length": "5 epochs"}


RECORDS = [made("lenet", 0.90, 0.010), made("slow", 0.89, 0.020), made("even", 0.90, 0.011), made("good", 0.92, 0.040, 1.5)]


def test_the_front_has_what_nothing_else_beats(front: Any) -> None:
    assert [r["what"] for r in RECORDS if front.on_front(r, RECORDS)] == ["lenet", "good"]
    assert front.on_front(RECORDS[1], RECORDS[1:2]) and all(front.on_front(r, [r, dict(r)]) for r in RECORDS)


def test_the_table_and_the_picture_have_each_model_and_the_line_its_front(front: Any) -> None:
    lines = front.table(RECORDS).splitlines()
    assert lines[1].split() == ["lenet", "0.9000", "1,000", "2.50", "10.0", "0.050", "-"] and lines[4].split()[-1] == "1.50"
    files = front.drawn(RECORDS)
    assert set(files) == {"front-light.svg", "front-dark.svg"}
    for picture in files.values():
        assert all(f">{r['what']}</text>" in picture for r in RECORDS) and "Trained for 5 epochs." in picture
        dashed, = [line for line in picture.splitlines() if "stroke-dasharray" in line]
        assert dashed.split('points="')[1].split('"')[0].count(",") == 2


def test_missing_data_are_named_before_anything_is_trained(front: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["front.py", str(tmp_path / "none")])
    with pytest.raises(MissingError, match="none/train.*examples/fashion/data.py writes it"):
        front.main()
