"""A model learns from another's predictions in a file: rows matched by number, on any ranks; other files are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from launch import ROOT
from real_data import real
from runs import SMALL, record
from standing import mpirun

from mpitrain.config import load_config
from mpitrain.data import Dataset, describe
from mpitrain.errors import ConfigError, DataError, MissingError
from mpitrain.train.build.inputs import describe_files

KEYS = ("train.reproducible=layout", "train.micro_batches=4", "train.steps=8", "train.eval_every=8", "optimizer.warmup_steps=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, its predictions for its data, and students of these on one rank and on two stages."""
    found = tmp_path_factory.mktemp("teachers")
    (found / "run.toml").write_text(SMALL)
    run(found, 1, "train", "run.toml", *KEYS, "run.out=teacher")
    run(found, 1, "predict", "teacher", "digits", "--out", "known.h5")
    for n, mesh in ((1, "mesh.pp=1"), (2, "mesh.pp=2"), (2, "mesh.dp=2")):
        run(found, n, "train", "run.toml", *KEYS, mesh, "model.hidden=[8]", "distil.predictions=known.h5",
            f"run.out={mesh[5:]}")
    return found


def run(folder: Path, n: int, *words: str, rc: int = 0) -> str:
    done = mpirun(n, "-m", "mpitrain", *words, cwd=folder)
    assert done.rc == rc, done.err
    return done.err if rc else done.out


def test_a_student_of_predictions_has_the_same_bits_on_one_rank_on_two_and_on_two_stages(folder: Path) -> None:
    one, two, stages = (record(folder / name)["parameters_sha256"] for name in ("pp=1", "dp=2", "pp=2"))
    assert one == two == stages
    run(folder, 1, "replay", "pp=1", "--step", "3")


def test_the_loss_is_that_of_the_rows_own_predictions(folder: Path) -> None:
    """Of the first step, from the first values: the labels' and the teacher's part, in float64."""
    from mpitrain import data
    from mpitrain.train.build.model import make_model
    from mpitrain.train.build.saved import load
    saved = load(folder / "pp=1")
    model = make_model(saved.config)
    model.initialize(saved.config.run.seed)
    with h5py.File(folder / "known.h5") as file:
        known = file["predictions"][:].astype(np.float64)
    digits = Dataset(describe("digits"))
    rows, _ = data.split(len(digits), saved.config.data.validation, seed=0)
    batch = data.Sampler(rows, 48, seed=0).rows(0, 0, 48)
    x, y = digits.read(batch)
    output = model(saved.transforms(x).astype(np.float32)).numpy().astype(np.float64)
    hard = -log_softmax(output)[np.arange(48), y].sum()
    teacher = log_softmax(known[batch] / 4)
    soft = (np.exp(teacher) * (teacher - log_softmax(output / 4))).sum()
    first = json.loads((folder / "pp=1" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx((0.5 * hard + 0.5 * 16 * soft) / 48, rel=1e-5)


def log_softmax(x: Any) -> Any:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_it_is_evaluated_and_used_without_them(folder: Path) -> None:
    known = (folder / "known.h5").rename(folder / "elsewhere.h5")
    try:
        assert json.loads(run(folder, 1, "evaluate", "pp=1").splitlines()[-1])["loss"] < 4
        said = run(folder, 1, "train", "run.toml", *KEYS, "distil.predictions=known.h5", "run.out=no", rc=66)
        assert "known.h5" in said and not (folder / "no").exists()
    finally:
        known.rename(folder / "known.h5")


def looked_at(folder: Path, file: str, path: str = "digits", **more: Any) -> Any:
    return describe_files(path, 0.2, folder, "", "", predictions=file, **more)


def changed(folder: Path, change: Callable[[Any], None], name: str = "changed.h5") -> str:
    with h5py.File(folder / "known.h5") as file, h5py.File(folder / name, "w") as new:
        new["predictions"] = file["predictions"][:]
        new.attrs.update(file.attrs)
        change(new)
    return name


def shorter(file: Any) -> None:
    values = file["predictions"][:-1]
    del file["predictions"]
    file["predictions"] = values


@pytest.mark.parametrize(("change", "message"), [
    (shorter, "has 1,796 rows, and data.path has 1,797"),
    (lambda file: file.attrs.update({"rows_sha256": b"0" * 32}), "not those of data.path, or not in this order"),
    (lambda file: file.attrs.update({"as": b"classes"}), 'holds "classes"'),
    (lambda file: file.attrs.__delitem__("as"), 'it has no attribute "as"'),
    (lambda file: file.attrs.update({"step": np.zeros(400)}), 'it has no attribute "step"')])
def test_files_that_do_not_fit_are_refused(folder: Path, change: Callable[[Any], None], message: str) -> None:
    with pytest.raises(DataError, match=message) as found:
        looked_at(folder, changed(folder, change))
    assert "\n" not in str(found.value)


def test_what_is_no_file_of_predictions_is_refused(folder: Path) -> None:
    assert looked_at(folder, "known.h5")["predictions"]["about"]["as"] == "outputs"
    with pytest.raises(MissingError, match="is not there"):
        looked_at(folder, "nowhere.h5")
    with pytest.raises(DataError, match="is a folder, and distil.teacher takes one"):
        looked_at(folder, "teacher")
    with pytest.raises(DataError, match="predict --out FILE.h5"):
        looked_at(folder, "known.npz")
    with h5py.File(folder / "tokens.h5", "w") as file:
        file["x"] = np.arange(1797) % 10
    with pytest.raises(DataError, match="a row each, and these data are for tokens"):
        looked_at(folder, "known.h5", str(folder / "tokens.h5"))


def nan(file: Any) -> None:
    file["predictions"][:, 3] = np.nan


def test_a_row_that_is_not_finite_ends_every_rank(folder: Path) -> None:
    file = changed(folder, nan, "nan.h5")
    said = run(folder, 2, "train", "run.toml", *KEYS, f"distil.predictions={file}", "run.out=ended", rc=65)
    assert "nan.h5" in said and "value 3 of this row is nan" in said


@pytest.mark.parametrize(("keys", "message"), [
    (["model.outputs=12"], r"have rows of shape \(10,\), and the model's outputs have \(12,\)"),
    (['data.augment=["flip"]'], "data.augment changes them")])
def test_runs_that_do_not_fit_are_refused(folder: Path, keys: list[str], message: str) -> None:
    """By `inspect`, as by `train`."""
    from mpitrain.backend import CPU
    from mpitrain.parallel.pipeline.feed import Feed
    from mpitrain.placement.place import place
    from mpitrain.plan.prepare import open_data
    from mpitrain.schedules.grid import Grid
    from mpitrain.train.build.model import make_model
    from mpitrain.train.build.teacher import find
    config = load_config(folder / "run.toml", ["distil.predictions=known.h5", *keys])
    placed = place(make_model(config), Grid({}), config.mesh, config.train, config.comm)
    classes = config.model.arguments["outputs"]
    with pytest.raises(ConfigError, match=message):
        find(config, open_data(config), placed, Feed(CPU, np.float32), classes)


@pytest.mark.parametrize(("keys", "message"), [
    (["distil.teacher=teacher"], "name two teachers"), (["mesh.cp=2"], "mesh.cp = 2 cuts them"),
    (["run.out=known.h5"], "one folder, or one lies in the other"),
    (["distil.predictions=", "distil.weight=1"], "and no teacher"),
    (["distil.predictions=", "distil.teacher=teacher", "run.out=teacher"], 'distil.teacher = "teacher" and run.out = "teacher"'),
    (["distil.temperature=-1"], "more than 0"),
    (["distil.weight=1.5"], r"in \(0, 1\]"), (["distil.weight=-0.5"], r"in \(0, 1\]")])
def test_wrong_keys_are_refused(folder: Path, keys: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=message):
        load_config(folder / "run.toml", ["distil.predictions=known.h5", *keys])


@pytest.mark.slow
def test_probabilities_teach_as_outputs_do(folder: Path) -> None:
    run(folder, 2, "predict", "teacher", "digits", "--out", "shares.h5", "--as", "probabilities")
    run(folder, 1, "train", "run.toml", *KEYS, "model.hidden=[8]", "distil.predictions=shares.h5", "run.out=shares")
    one, other = (record(folder / name)["metrics"]["loss"] for name in ("pp=1", "shares"))
    assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.slow
def test_it_goes_on_with_the_same_predictions_alone(folder: Path) -> None:
    words = ("train", "run.toml", *KEYS, "model.hidden=[8]", "checkpoint.every=4")
    run(folder, 1, *words, "train.steps=4", "distil.predictions=known.h5", "run.out=parts", "optimizer.schedule=constant")
    other = changed(folder, lambda file: file["predictions"].write_direct(np.zeros((1797, 10), "f4")), "other.h5")
    said = run(folder, 1, *words, f"distil.predictions={other}", "run.out=parts", "--resume", "auto",
               "optimizer.schedule=constant", rc=65)
    assert "the predictions data are not the checkpoint's" in said
    (folder / "copy.h5").write_bytes((folder / "known.h5").read_bytes())
    run(folder, 2, *words, "distil.predictions=copy.h5", "run.out=parts", "--resume", "auto", "optimizer.schedule=constant")
    run(folder, 1, *words, "distil.predictions=known.h5", "run.out=all", "optimizer.schedule=constant")
    assert record(folder / "parts")["parameters_sha256"] == record(folder / "all")["parameters_sha256"]


@pytest.mark.slow
def test_a_taught_net_is_better_than_one_that_learns_from_labels_alone(tmp_path: Path) -> None:
    """LeNet-5 teaches a LeNet of a tenth of its work on 500 images of MNIST; the benchmark has five seeds."""
    images = real("t10k-images-idx3-ubyte.gz")
    done = subprocess.run([sys.executable, ROOT / "benchmarks/distilling.py", images, "--seeds", "1"], capture_output=True,
                          text=True, cwd=tmp_path, check=True)
    assert float(done.stdout.splitlines()[-1].split(" seeds ")[1].split()[0]) > 1, done.stdout
