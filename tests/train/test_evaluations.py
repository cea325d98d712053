"""Metrics of runs: the same bits on any ranks, scikit-learn's of what the model gave, in the units of the targets; and what ends
a run early."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from runs import SMALL, lines, many, ok, record, write
from standing import mpirun, train

from mpitrain.config import load_config
from mpitrain.data import write_shards
from mpitrain.errors import ConfigError
from mpitrain.metrics import find_metrics
from mpitrain.plan.inspect import inspect_config
from mpitrain.train.measure import refuse_cut_rows

OWN = """
import numpy as np
from mpitrain.metrics import Metric

class All(Metric):
    '''Every output and target: what a test compares metrics of.'''
    adds, scalar = "rows", False
    def part(self, seen):
        n = len(seen.targets)
        return np.concatenate([seen.outputs.reshape(n, -1), seen.targets.reshape(n, -1)], axis=1)
    def value(self, total):
        return total.tolist()

class Table(Metric):
    adds, scalar = "counts", False
    def part(self, seen):
        return np.bincount(seen.predicted, minlength=10)
    def value(self, total):
        return {"share": total / 0.0, "most": total.max(), 3: total[:2]}

class Never(Metric):
    def part(self, seen):
        return np.zeros(1)
    def value(self, total):
        return float("nan")

class Odd(Table):
    def value(self, total):
        return {1, 2}

class Wrong(Metric):
    def part(self, seen):
        return np.zeros(2) / seen.nothing
    def value(self, total):
        return 0.0
"""
BY_PARTS = ("mesh.tp=2", 'mesh.plan={head = "vocabulary"}')
LAYOUT = ("train.reproducible=layout", "train.micro_batches=6")
ASKED = 'train.metrics=["mine.py:All", "f1", "auc", "log_loss", "average_precision", {name = "top_k", k = 3}, "confusion"]'


EARLY = ("stop.patience=2", "stop.metric=accuracy", "stop.min_delta=0.5", "train.eval_every=5", "checkpoint.every=5",
         "checkpoint.best_metric=accuracy", "checkpoint.keep=20", "optimizer.schedule=constant")
CUT_SHORT = 10


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A folder of runs, and by name what each of them, or an evaluation of it, has found or was refused for."""
    folder, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(1)
    x = rng.normal(size=(300, 5)).astype(np.float32)
    with h5py.File(folder / "units.h5", "w") as file:
        file["x"], file["y"] = x, (1000 + 50 * x[:, :1] * [1, 2] + rng.normal(size=(300, 2))).astype(np.float32)
    with h5py.File(folder / "one.h5", "w") as file:
        file["x"], file["y"] = np.ones((40, 64), np.float32), np.repeat([0, 1], [36, 4])
    (folder / "mine.py").write_text(OWN)
    write(folder)
    few = ("train.steps=20", "train.eval_every=20")
    asked: dict[str, tuple[Any, ...]] = {
        "one": (1, *few, *LAYOUT, ASKED), "two": (2, *few, *LAYOUT, ASKED), "cut": (2, *few, ASKED, *BY_PARTS),
        "evaluated": (2, "evaluate", "one"),
        "units": (2, *few, "model.inputs=5", "model.outputs=2", "data.path=units.h5", "train.loss=mse",
                  "data.target_transform=standardise", 'train.metrics=["mine.py:All", "mae", "rmse", "r2", "relative_l2"]'),
        "lacking": (2, "data.path=one.h5", "data.validation=tail:0.1", 'train.metrics=["auc"]', "model.outputs=2",
                    "data.transform=[]", "train.batch_size=8"),
        "early": (2, *EARLY), "shorter": (2, *EARLY, f"train.steps={CUT_SHORT}", "run.out=again"),
        "resumed": (2, *EARLY, "run.out=again", "--resume"), "best": (1, "evaluate", "early", "best"),
        "ended": (1, *EARLY, "run.out=again", "--resume"), "patient": (1, *EARLY, "run.out=again", "--resume", "stop.patience=4")}
    words = [(n, *keys) if keys[0] == "evaluate" else (n, "run.toml", f"run.out={name}", *keys)
             for name, (n, *keys) in asked.items()]
    return folder, dict(zip(asked, many(folder, *words)))


def test_metrics_have_the_same_bits_on_any_ranks_and_are_scikit_learns(runs: Any) -> None:
    sk = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed: pip install scikit-learn")
    folder, told = runs
    first = record(folder / "one")["metrics"]
    assert record(folder / "two")["metrics"] == first
    rows = np.array(first.pop("All"))
    z, y = rows[:, :-1], rows[:, -1].astype(int)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    expected = {"f1": sk.f1_score(y, z.argmax(axis=1), average="macro"), "auc": sk.roc_auc_score(y, p, multi_class="ovr"),
                "log_loss": sk.log_loss(y, p), "average_precision": sk.average_precision_score(np.eye(10)[y], p),
                "top_3": sk.top_k_accuracy_score(y, z, k=3), "accuracy": sk.accuracy_score(y, z.argmax(axis=1))}
    for name, value in expected.items():
        assert first[name] == pytest.approx(value, rel=1e-12), name
    assert first["confusion"] == sk.confusion_matrix(y, z.argmax(axis=1)).tolist()
    assert first["classes"] == list("0123456789") and "confusion" not in lines(folder / "one")[-1]
    for name in (*expected, "confusion"):
        assert told["evaluated"][name] == first[name]


@pytest.mark.slow
def test_metrics_have_these_bits_on_three_and_four_ranks_and_two_stages_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    write(tmp_path)
    keys = ("train.steps=20", "train.eval_every=20", *LAYOUT, ASKED)
    many(tmp_path, *[(n, "run.toml", f"run.out=on{n}", *keys, *more) for n, more in ((1, ()), (3, ()), (4, ("mesh.pp=2",)))])
    one, *others = (record(tmp_path / f"on{n}")["metrics"] for n in (1, 3, 4))
    assert others == [one, one]


def test_ranks_that_have_parts_of_the_outputs_put_them_together(runs: Any) -> None:
    one, two = (record(runs[0] / name)["metrics"] for name in ("one", "cut"))
    assert np.array(two["All"]) == pytest.approx(np.array(one["All"]), rel=1e-3, abs=1e-4)
    assert two["auc"] == pytest.approx(one["auc"], abs=1e-4) and two["confusion"] == one["confusion"]


TEXT = """
[model]
name = "gpt"
vocabulary = 12
block = 16
layers = 1
heads = 2
width = 16
[data]
path = "words"
validation = "tail:0.2"
[train]
steps = 2
batch_size = 8
micro_batches = 2
metrics = ["perplexity", "f1", "confusion"]
"""


def test_ranks_that_share_the_positions_of_rows_count_their_own(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 12, 1000).astype(np.uint8)
    write_shards(tmp_path / "words", tokens, kind="tokens", vocabulary=list("abcdefghijkl"))
    found = []
    for n in (1, 2):
        ok(train(n, write(tmp_path, TEXT), f"run.out=cp{n}", f"mesh.cp={n}"))
        found.append(record(tmp_path / f"cp{n}")["metrics"])
    one, two = found
    assert np.sum(two["confusion"]) == np.sum(one["confusion"]) == 199      # all tokens of the last fifth but the first
    assert two["perplexity"] == pytest.approx(one["perplexity"], rel=1e-5) and two["f1"] == pytest.approx(one["f1"], abs=0.02)


def test_metrics_of_whole_rows_are_refused_where_ranks_have_parts_of_them() -> None:
    refuse_cut_rows(find_metrics(["mae", "rmse"]), "values", 2)
    refuse_cut_rows(find_metrics(["auc"]), "classes", 2)
    for name, kind in (("r2", "values"), ("relative_l2", "values"), ("auc", "binary")):
        with pytest.raises(ConfigError, match=f'"{name}" is of whole rows, and mesh.cp = 2 cuts them'):
            refuse_cut_rows(find_metrics([name]), kind, 2)


def test_metrics_of_numbers_are_in_the_units_of_the_targets(runs: Any) -> None:
    found = record(runs[0] / "units")["metrics"]
    rows = np.array(found["All"])
    p, true = rows[:, :2], rows[:, 2:]
    assert 800 < true.mean() < 1200 and found["mae"] == pytest.approx(np.abs(p - true).mean(), rel=1e-12)
    assert found["rmse"] == pytest.approx(math.sqrt(((p - true) ** 2).mean()), rel=1e-12)
    spread = ((true - true.mean(axis=0)) ** 2).sum(axis=0)
    assert found["r2"] == pytest.approx((1 - ((p - true) ** 2).sum(axis=0) / spread).mean(), rel=1e-11)


def test_a_table_of_ones_own_is_written_whatever_numbers_it_has(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    words = (write(tmp_path), "run.out=own", "train.steps=20", 'train.metrics=["mine.py:Table", "mine.py:Never"]')
    with np.errstate(all="ignore"):
        ok(train(1, *words))
        whole = record(tmp_path / "own")["metrics"]
        ok(train(1, *words, "--resume"))                               # nothing was left to do
    found = whole["Table"]
    assert whole["Never"] is None and record(tmp_path / "own")["metrics"] == whole
    assert found["share"] == [None] * 10 and 0 < found["most"] <= 359 and len(found["3"]) == 2


@pytest.mark.parametrize("keys, words", [
    (['train.metrics=["mae"]'], ["mae", "labels of classes"]), (['train.metrics=["F1"]'], ["unknown metric", "f1"]),
    (['train.metrics=[{name="top_k", k=11}]'], ["k = 11", "10 classes"]),
    (['train.metrics=["mine.py:Wrong"]'], ["Wrong", "nothing", "mine.py"]),
    (['train.metrics=["mine.py:Odd"]'], ['"Odd" must give a table of numbers', "set"]),
    (["stop.patience=2", "stop.metric=f1"], ["stop.metric", "f1"]),
    (["checkpoint.best_metric=auc"], ["checkpoint.best_metric", "auc"]),
    (["stop.patience=2", "data.validation=0"], ["stop.patience = 2 follows evaluations"]),
    (["average.kind=ema", "average.start=900"], ["900", "50 steps"]),
    (["average.kind=ema", "average.decay=1.0"], ["average.decay"]), (["average.kind=mean"], ["average.kind", "mean"]),
    (["data.validation=fold:6/5"], ["1/5 to 5/5"]), (["data.validation=fold:x"], ["2/5"]),
    (["train.weight=even"], ["weight"])])
def test_what_cannot_be_is_refused_in_a_line(tmp_path: Path, keys: list[str], words: list[str]) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(ConfigError) as error:
        list(inspect_config(load_config(write(tmp_path), keys), 1))
    assert all(word in str(error.value) for word in words), error.value


def test_a_class_that_the_validation_rows_have_not_is_told_before_training(runs: Any) -> None:
    found = runs[1]["lacking"]
    assert found["status"] == 78 and all(word in found["message"] for word in ("auc", "no row of class 0", "stratified")), found


def test_a_run_ends_when_its_metric_has_not_become_better_also_when_resumed(runs: Any) -> None:
    folder, told = runs
    about = record(folder / "early")
    found = [line for line in lines(folder / "early") if line.get("split") == "validation"]
    assert about["status"] == "done" and about["steps"] == about["ended"]["step"] == found[-1]["step"] < 50
    assert "accuracy has not become better by more than 0.5 for 2 evaluations" in about["ended"]["reason"]
    assert len(found) >= 3 and about["steps"] > CUT_SHORT
    assert not (folder / "early" / "checkpoints" / "step-00000050").exists()
    assert told["shorter"]["steps"] == CUT_SHORT and told["resumed"] == told["early"]
    assert told["best"]["accuracy"] == max(line["accuracy"] for line in found)


def test_a_run_that_had_ended_stays_ended_until_it_is_given_more_patience(runs: Any) -> None:
    folder, told = runs
    assert told["ended"]["steps"] == told["resumed"]["steps"] < told["patient"]["steps"] == record(folder / "again")["steps"]


def test_without_metrics_nothing_of_them_is_imported(tmp_path: Path) -> None:
    program = ("import sys\nfrom pathlib import Path\nfrom mpitrain.config import load_config\nfrom mpitrain.run import Run\n"
               "with Run.of_job(load_config(Path('run.toml'), []), quiet=True) as run: run.train()\n"
               "late = [m for m in sys.modules if m.startswith('mpitrain.metrics') or m.endswith(('measure', 'averaging'))]\n"
               "assert not late, late\n")
    (tmp_path / "program.py").write_text(program)
    write(tmp_path, SMALL.replace("steps = 50", "steps = 2"))
    ok(mpirun(1, "program.py", cwd=tmp_path))
