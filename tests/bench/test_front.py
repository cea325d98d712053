"""benchmarks/front.py: which models nothing else beats, and the picture that says so."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from launch import ROOT

from mpitrain.errors import DataError, MissingError


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, without the variables that it sets for the processes that it measures."""
    monkeypatch.setitem(sys.modules, "pinned", ModuleType("pinned"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "docs/figures"))
    return importlib.import_module("front")


@pytest.fixture
def chart(front: Any) -> Any:
    return importlib.import_module("front_chart")


def made(what: str, accuracy: float, step_s: float, step_j: float | None = None) -> dict[str, Any]:
    return {"what": what, "accuracy": accuracy, "step_s": step_s, "sample_s": step_s / 200, "step_j": step_j, "parameters": 1000,
            "multiply_adds": 2_500_000, "length": "5 epochs", "command": "python", "date": "2026-11-23"}


RECORDS = [made("lenet", 0.90, 0.010), made("slow", 0.89, 0.020), made("even", 0.90, 0.011), made("good", 0.92, 0.040, 1.5)]


def test_the_front_has_what_nothing_else_beats(chart: Any) -> None:
    assert [r["what"] for r in RECORDS if chart.on_front(r, RECORDS)] == ["lenet", "good"]
    assert chart.on_front(RECORDS[1], RECORDS[1:2]) and all(chart.on_front(r, [r, dict(r)]) for r in RECORDS)


def test_the_table_and_the_picture_have_each_model_and_the_line_its_front(front: Any) -> None:
    lines = front.table(RECORDS).splitlines()
    assert lines[1].split() == ["lenet", "0.9000", "1,000", "2.50", "10.0", "0.050", "-"] and lines[4].split()[-1] == "1.50"
    files = front.drawn(RECORDS)
    assert set(files) == {"front-light.svg", "front-dark.svg"}
    for picture in files.values():
        assert all(f">{r['what']}</text>" in picture for r in RECORDS) and "trained for 5 epochs." in picture
        *_, dashed = [line for line in picture.splitlines() if 'stroke-dasharray="6 4"' in line]
        assert dashed.split('points="')[1].split('"')[0].count(",") == 2


def test_a_row_of_the_page_is_bold_on_the_front(chart: Any) -> None:
    assert chart.rows(RECORDS)[2:4] == ["| **lenet** | 0.9000 | 1,000 | 2.50 | 10.0 | 0.050 |  | `python` | 2026-11-23 |",
                                        "| slow | 0.8900 | 1,000 | 2.50 | 20.0 | 0.100 |  | `python` | 2026-11-23 |"]
    assert chart.rows(RECORDS)[-1].endswith("| 1.50 | `python` | 2026-11-23 |") and chart.drawn(None, []) == ""


def test_labels_cover_neither_points_nor_each_other(chart: Any) -> None:
    points = [(100.0, 380.0), (400.0, 300.0), (416.0, 307.0), (500.0, 270.0), (514.0, 266.0), (766.0, 130.0)]
    labels = chart.placed(points, points[:2], [("mobilenet_v2-0.35", "0.912, 85 ms")] * 6)
    dots = [(x - chart.RADIUS, y - chart.RADIUS, x + chart.RADIUS, y + chart.RADIUS) for x, y in points]
    for i, label in enumerate(labels):
        assert not any(chart.overlap(label, other) for other in [*dots, *labels[:i]])


def test_models_that_a_file_has_are_not_trained_again(front: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    trained: list[str] = []

    def train(name: str, *_: Any) -> float:
        trained.append(name)
        if name == "mnasnet-0.5" and len(trained) < 3:
            raise KeyboardInterrupt
        return 0.9
    monkeypatch.setattr(front, "trained", train)
    own = {key: value for key, value in RECORDS[0].items() if key not in ("what", "accuracy", "length")}
    monkeypatch.setattr(front, "measured", lambda *_: own)
    (tmp_path / "data/train").mkdir(parents=True)
    file = tmp_path / "front.jsonl"

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["front.py", *arguments])
        front.main()
    wanted = (str(tmp_path / "data"), "--models", "lenet,mnasnet-0.5", "--json", str(file))
    with pytest.raises(KeyboardInterrupt):
        run(*wanted)
    first = file.read_text()
    run(*wanted)
    assert trained == ["lenet", "mnasnet-0.5", "mnasnet-0.5"] and file.read_text().startswith(first)
    run(*wanted, "--epochs", "2")                  # another setting
    assert trained[3:] == ["lenet", "mnasnet-0.5"] and len(file.read_text().splitlines()) == 2
    capsys.readouterr()
    run("--from", str(file), "--draw", str(tmp_path / "drawn"))
    assert len(trained) == 5 and "mnasnet-0.5" in capsys.readouterr().out
    assert "trained for 2 epochs" in (tmp_path / "drawn/front-dark.svg").read_text()
    file.write_text("no record\n")
    with pytest.raises(DataError, match="is not what --json has written"):
        run("--from", str(file))
    with pytest.raises(MissingError, match="--json FILE writes it"):
        run("--from", str(tmp_path / "none"))


def test_missing_data_are_named_before_anything_is_trained(front: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["front.py", str(tmp_path / "none")])
    with pytest.raises(MissingError, match="none/train.*examples/fashion/data.py writes it"):
        front.main()
