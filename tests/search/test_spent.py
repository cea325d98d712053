"""What a private study spends in all, against Renyi divergences in closed form, and against the ledgers of its trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from standing import mpirun
from studies import STUDY

from mpitrain.cli import main
from mpitrain.config import load_config
from mpitrain.config.sections import Config
from mpitrain.errors import CheckpointError
from mpitrain.privacy.accountant import RenyiAccountant
from mpitrain.search.spent import spent_of
from mpitrain.search.table import Trial

PRIVATE = STUDY.replace("[search]", "[privacy]\nunit = \"sample\"\nepsilon = 3.0\n[search]").replace("momentum = 0.9\n", "")


def ledger(folder: Path, number: int, history: Any, **more: Any) -> Trial:
    """A trial that has trained, and what it keeps of that."""
    path = folder / "trials" / f"{number:04d}"
    path.mkdir(parents=True, exist_ok=True)
    record = {"unit": "sample", "count": 1000, "delta": 1e-5, "clip": 1.0, "noise": 4.0, "history": history, **more}
    (path / "privacy.json").write_text(json.dumps(record))
    return Trial(number, {"optimizer.lr": 0.1}, 0, results={0: {"accuracy": 0.5}})


@pytest.fixture
def base(tmp_path: Path) -> Config:
    (tmp_path / "run.toml").write_text(PRIVATE.partition("[search]")[0])
    return load_config(tmp_path / "run.toml", [])


def epsilon_of_gaussians(steps: int, sigma: float, delta: float) -> float:
    """Of so many steps that all rows are in: a divergence of order / (2 sigma^2) each (Mironov, 2017, proposition 7)."""
    orders = np.linspace(1.02, 64, 200_000)
    return float(np.min(steps * orders / (2 * sigma**2) + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)))


def test_steps_of_all_trials_are_those_of_one_mechanism(tmp_path: Path, base: Config) -> None:
    trials = [ledger(tmp_path, n, [[1.0, 20.0, steps]]) for n, steps in enumerate((10, 30, 60))]
    found = spent_of(tmp_path, trials, base)
    assert found is not None and found["composed"] and found["trials"] == 3
    assert found["epsilon"] == pytest.approx(epsilon_of_gaussians(100, 20.0, 1e-5), rel=2e-3)
    assert found["each"]["1"] == pytest.approx(epsilon_of_gaussians(30, 20.0, 1e-5), rel=2e-3)
    assert max(found["each"].values()) < found["epsilon"] < sum(found["each"].values())
    assert "together" in found["said"][0] and "one row among 1000" in found["said"][1]


def test_other_deltas_are_added_plainly_and_trials_without_an_epsilon_leave_none(tmp_path: Path, base: Config) -> None:
    trials = [ledger(tmp_path, 0, [[1.0, 20.0, 10]]), ledger(tmp_path, 1, [[1.0, 20.0, 10]], delta=1e-6)]
    found = spent_of(tmp_path, trials, base)
    assert found is not None and not found["composed"] and found["delta"] == pytest.approx(1.1e-5)
    assert found["epsilon"] == pytest.approx(sum(epsilon_of_gaussians(10, 20.0, delta) for delta in (1e-5, 1e-6)), rel=2e-3)
    assert "the plain sum of their epsilons" in found["said"][0]
    bare = Trial(2, {}, 0, results={0: {"accuracy": 0.5}})    # drawn so that no epsilon holds: it keeps no record
    for make, why in ((lambda: bare, "trial 2 has none"), (lambda: ledger(tmp_path, 2, None), "trial 2 has none"),
                      (lambda: ledger(tmp_path, 2, [[1.0, 20.0, 1]], count=9), "trials hide others: 9 samples, 1000 samples")):
        (told,) = (spent_of(tmp_path, [*trials, make()], base) or {})["said"]
        assert told.startswith("privacy: no epsilon is told of the study in all") and why in told
    (tmp_path / "trials/0001/privacy.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        spent_of(tmp_path, trials, base)


def test_a_private_study_says_what_it_spends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "study.toml").write_text(PRIVATE)
    done = mpirun(2, "-m", "mpitrain", "search", tmp_path / "study.toml", "run.out=study", "search.trials=3",
                  "search.rungs=[1,2]", "train.epochs=2", cwd=tmp_path, timeout=120)
    assert done.rc == 0, done.err
    kept = [json.loads(path.read_text())["history"] for path in sorted((tmp_path / "study/trials").glob("*/privacy.json"))]
    steps: dict[tuple[float, float], int] = {}
    for q, sigma, count in (one for history in kept for one in history):
        steps[q, sigma] = steps.get((q, sigma), 0) + count
    epsilon = RenyiAccountant().epsilon(steps, 1e-5)
    assert len(kept) == 3 and epsilon > 3.0
    found, whole = (json.loads((tmp_path / "study" / name).read_text()) for name in ("privacy.json", "study.json"))
    assert found["epsilon"] == pytest.approx(epsilon) and whole["privacy"] == found
    line = f"privacy: epsilon {epsilon:.4g} at delta 1e-05 for the 3 trials together"
    assert main(["inspect", str(tmp_path / "study")]) == 0
    assert line in done.out and line in capsys.readouterr().out
