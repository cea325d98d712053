"""All folds of a run by one command, and class weights that follow a fold's own training rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from runs import lines, many, ok, record, refused, write
from standing import mpirun

from mpitrain.cli import main
from mpitrain.data import split
from mpitrain.errors import UsageError
from mpitrain.train.build.inputs import balanced_weights, open_data


def folds(n: int, tmp_path: Path, *arguments: str) -> dict[str, dict[str, float]]:
    found = ok(mpirun(n, "-m", "mpitrain", "folds", "run.toml", "--k", "3", "--quiet", "run.out=all", "train.steps=10",
                      *arguments, cwd=tmp_path))
    told = json.loads(found.out.strip().splitlines()[-1])
    assert told == json.loads((tmp_path / "all" / "folds.json").read_text()) and told["folds"] == 3
    metrics: dict[str, dict[str, float]] = told["metrics"]
    return metrics


def test_the_folds_of_a_run_are_runs_whose_metrics_have_a_mean_and_a_deviation(tmp_path: Path) -> None:
    write(tmp_path)
    metrics = folds(2, tmp_path, "--stratified", 'train.metrics=["f1"]')
    for name in ("loss", "accuracy", "f1"):
        values = [record(tmp_path / "all" / f"fold-{i}")["metrics"][name] for i in (1, 2, 3)]
        assert metrics[name]["values"] == values and metrics[name]["mean"] == pytest.approx(np.mean(values), rel=1e-14)
        assert metrics[name]["deviation"] == pytest.approx(np.std(values, ddof=1), rel=1e-12)
    assert folds(1, tmp_path, "--stratified", 'train.metrics=["f1"]', "--resume") == metrics
    assert len(lines(tmp_path / "all" / "fold-2")) == 11        # Nothing was trained again.
    there = mpirun(1, "-m", "mpitrain", "folds", "run.toml", "--k", "3", "run.out=all", cwd=tmp_path)
    refused(there, there.rc, "fold-1", "--overwrite")


def test_what_is_asked_of_folds_is_checked() -> None:
    with pytest.raises(UsageError, match="2 or more"):
        main(["folds", "run.toml", "--k", "1"])


def test_folds_are_refused_where_other_rows_are_to_be_validated_on(tmp_path: Path) -> None:
    config = write(tmp_path)
    (tmp_path / "other.h5").touch()
    for asked, words in (('"other.h5"', ("other.h5", "data.path", "leave it out")), ('"stratified:1/3"', ("--stratified",))):
        found = mpirun(1, "-m", "mpitrain", "folds", config, "--k", "3", "run.out=all", f"data.validation={asked}", cwd=tmp_path)
        refused(found, 78, "data.validation", *words)
    assert not (tmp_path / "all").exists()
    for rest in (["--stratified", "data.validation=stratified:1/3"], ["data.validation=fold:1/3"], ["data.validation=tail:0.2"]):
        with pytest.raises(UsageError, match="working folder"):              # the next thing that is checked
            main(["folds", str(config), "run.out=.", *rest])


def test_all_ranks_end_alike_where_the_table_of_the_folds_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "all" / "folds.json").mkdir(parents=True)
    config = write(tmp_path)
    refused(mpirun(2, "-m", "mpitrain", "folds", config, "--k", "2", "run.out=all", "train.steps=2", cwd=tmp_path), 73,
            "rank=0/2", "folds.json", "it is a folder")
    assert not (tmp_path / "all" / "fold-1").exists()                       # found before any training
    (tmp_path / "late" / "folds.json.tmp").mkdir(parents=True)
    refused(mpirun(2, "-m", "mpitrain", "folds", config, "--k", "2", "run.out=late", "train.steps=2", cwd=tmp_path), 74,
            "rank=0/2", "folds.json")
    assert (tmp_path / "late" / "fold-2" / "run.json").exists()


def test_balanced_weights_are_scikit_learns_of_the_training_rows() -> None:
    inputs = open_data("digits", validation="fold:2/5", seed=3)
    labels = inputs.training.read(np.asarray(inputs.train_rows))[1]
    found = balanced_weights(inputs)
    assert len(inputs.train_rows) == len(split(1797, "fold:2/5", seed=3)[0])
    assert found == [len(labels) / (10 * int((labels == c).sum())) for c in range(10)]
    utils = pytest.importorskip("sklearn.utils", reason="scikit-learn is not installed: pip install scikit-learn",
                                exc_type=ImportError)
    wanted = utils.class_weight.compute_class_weight("balanced", classes=np.arange(10), y=labels)
    assert found == pytest.approx(wanted, rel=1e-15)


def test_a_run_with_balanced_weights_is_the_run_with_these_numbers(tmp_path: Path) -> None:
    write(tmp_path)
    weights = balanced_weights(open_data("digits"))
    asked = [(1, "run.toml", f"run.out=w{i}", f"train.weight={weight}", "train.steps=4")
             for i, weight in enumerate(("balanced", json.dumps(weights)))]
    one, other, again = many(tmp_path, *asked, (1, "evaluate", "w0"))
    assert one == other and again["loss"] == one["loss"]


@pytest.mark.parametrize("loss", ["cross_entropy", "focal"])
def test_balanced_weights_for_more_outputs_than_there_are_labels_are_refused_by_their_name(tmp_path: Path, loss: str) -> None:
    write(tmp_path)
    words = ['train.weight = "balanced"', "labels 0 to 9", "the model has 12 outputs", "set its outputs to 10"]
    refused(mpirun(1, "-m", "mpitrain", "train", "run.toml", "train.weight=balanced", "model.outputs=12", f"train.loss={loss}",
                   cwd=tmp_path), 78, "E_CONFIG", *words)
