"""Searches on recorded learning curves in virtual time, and on a published table of architectures."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest
from acted import decisions
from launch import ROOT

from mpitrain.search.pruners import Unpruned
from mpitrain.search.replay import read_curves, replay
from mpitrain.search.study_file import read_study

CURVES = ROOT / "tests/search/curves.jsonl"


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_workers_take_jobs_when_they_are_free() -> None:
    """Worked out by hand: 4 jobs of 3, 1, 1 and 2 seconds on two workers."""
    made = decisions(Unpruned(), trials=4, rungs=(1,))
    ended, _ = replay(made, 2, lambda trial, reached, rung: ({"accuracy": 0.0}, (3.0, 1.0, 1.0, 2.0)[trial.id]))
    assert [(end.time, end.trial.id) for end in ended] == [(1.0, 1), (2.0, 2), (3.0, 0), (4.0, 3)]


def test_the_recorded_curves_are_those_of_their_study() -> None:
    curves, study = read_curves(CURVES), read_study(CURVES.with_suffix(".toml"), [])
    made = study.decisions()
    assert len(curves) == study.trials == 200 and all(len(curve.accuracies) == 27 for curve in curves)
    assert [curve.values for curve in curves[::20]] == [made.sampler.ask(made.table, n).values for n in range(0, 200, 20)]
    assert CURVES.stat().st_size < 100_000 and 0.94 < max(curve.accuracies[-1] for curve in curves) < 0.97


def test_asha_is_sooner_than_random_search_and_synchronous_halving_on_recorded_curves() -> None:
    """The bar: 16 workers, 20 seeds, medians."""
    found = benchmark("search_replay").medians(read_curves(CURVES), 16, 20)
    assert found["random"] / found["asha"] >= 1.8 and found["halving"] / found["asha"] >= 1.5


def test_a_search_on_curves_ends_where_all_are_known() -> None:
    replay_of = benchmark("search_replay")
    curves = read_curves(CURVES)
    best = max(curve.accuracies[-1] for curve in curves)
    alone = sum(curve.seconds * 27 for curve in curves)
    assert replay_of.time_to_target(curves, "none", 1, 0, best) <= alone
    assert replay_of.time_to_target(curves, "asha", 1, 0, 2.0) == float("inf")




def test_a_pickle_that_names_anything_but_a_number_is_refused(tmp_path: Path) -> None:
    """Of a published table, nothing runs."""
    plain = benchmark("nas_table").Plain
    for thing in (print, Path("a"), ValueError("x")):
        path = tmp_path / "bad.bench"
        path.write_bytes(pickle.dumps({1: thing}, protocol=3))
        with open(path, "rb") as file, pytest.raises(pickle.UnpicklingError, match="which is no number"):
            plain(file).load()


def test_evolution_finds_the_top_of_the_published_table(capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar: 15 of 20 seeds. Here 8 seeds, of which random search has 3, give or take one."""
    pytest.importorskip("nas_bench_graph")
    import json
    monkeypatch.setattr(sys, "argv", ["nas_table", "--seeds", "8"])
    benchmark("nas_table").main()
    random, evolution = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert random["architectures"] == 26206 and int(random["in the top"].split()[0]) <= 5
    assert int(evolution["in the top"].split()[0]) >= 6 and evolution["median looks to it"] < 300
