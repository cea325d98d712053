"""Rows that are not such as a model was trained on: which are refused, warned of, or found under a name of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from standing import mpirun

import mpitrain
from mpitrain.cli import main
from mpitrain.data.content import identity
from mpitrain.data.importers import import_text
from mpitrain.data.transforms import Standardise
from mpitrain.data.unlabelled import describe_rows
from mpitrain.errors import ConfigError, DataError, ShapeError, UsageError
from mpitrain.infer.rows import TrainingRow, trained_on
from mpitrain.infer.sample import Sampling

GPT = ("model.name=gpt", "model.vocabulary=8", "model.block=8", "model.width=16", "model.heads=2", "model.layers=1",
       "data.path=t.h5", "train.loss=cross_entropy", "data.transform=[]", "train.batch_size=8")
OWN = ("model.name=mlp", "model.inputs=5", "model.hidden=[8]", "model.outputs=3", "data.path=u.h5", "data.x=x", "data.y=y",
       "data.transform=standardise", "train.loss=cross_entropy", "train.batch_size=8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    with h5py.File(folder / "t.h5", "w") as file:
        file["tokens"] = rng.integers(0, 7, 400).astype(np.uint8)
    with h5py.File(folder / "u.h5", "w") as file:
        file["x"], file["y"] = rng.integers(0, 9, (128, 5)).astype(np.uint8), rng.integers(0, 3, 128)
    (folder / "run.toml").write_text("")
    for out, keys in (("gpt", GPT), ("own", OWN), ("raw", (*OWN, "data.transform=[]"))):
        done = mpirun(1, "-m", "mpitrain", "train", "run.toml", *keys, "data.validation=0", "train.steps=1", f"run.out={out}",
                      cwd=folder)
        assert done.rc == 0, done.err
    np.save(folder / "good.npy", np.ones((4, 5), np.uint8))
    np.save(folder / "floats.npy", np.ones((4, 5), np.float32))
    for width in (1, 7):
        np.save(folder / f"wide{width}.npy", np.ones((4, width), np.uint8))
    np.save(folder / "long.npy", np.ones((4, 40), np.uint8))
    np.save(folder / "unknown.npy", np.array([[1, 2, 3]] * 70 + [[1, 9, 3]], np.uint8))
    return folder


def predict(folder: Path, run: str, data: str) -> Any:
    return mpirun(1, "-m", "mpitrain", "predict", run, data, "--out", "out.npz", "--overwrite", cwd=folder)


def test_a_name_of_the_run_is_not_asked_of_files_that_have_none(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((4, 5)))
    np.savez(tmp_path / "one.npz", other=np.ones((4, 5)))
    np.savez(tmp_path / "two.npz", x=np.ones((4, 5)), inputs=np.ones((4, 6)))
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    found = {name: describe_rows(tmp_path / name, default="inputs")["x"] for name in ("a.npy", "one.npz", "two.npz", "a.csv")}
    assert found == {"a.npy": "x", "one.npz": "other", "two.npz": "inputs", "a.csv": "x"}
    with pytest.raises(DataError, match="leave out --x"):
        describe_rows(tmp_path / "a.npy", "inputs", default="inputs")


def test_rows_of_another_kind_are_warned_of_in_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = predict(folder, "own", "good.npy")
    assert done.rc == 0 and "warning" not in done.err, done.err
    done = predict(folder, "own", "floats.npy")
    said = "warning: the rows are float32, and the model was trained on uint8"
    assert done.rc == 0 and done.err.count("warning") == 1 and said in done.err
    model = mpitrain.load(folder / "own")
    model.predict(np.ones((2, 5), np.int64))
    assert not capsys.readouterr().err
    for _ in range(2):
        model.predict(np.ones((2, 5), np.float32))
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize("width", [1, 7])
def test_rows_of_another_width_are_refused_with_both(folder: Path, width: int) -> None:
    done = predict(folder, "own", f"wide{width}.npy")
    wanted = "change the rows to such as the model was trained on (uint8 of shape (5,))"
    assert done.rc == 65 and "E_SHAPE" in done.error_lines[0] and wanted in done.error_lines[0], done.err
    assert f"wide{width}.npy" in done.error_lines[0] and f"rows have shape ({width},)" in done.error_lines[0]
    with pytest.raises(ShapeError) as caught:
        mpitrain.load(folder / "own").predict(np.ones((2, width), np.uint8))
    assert wanted in caught.value.message and f"rows have shape ({width},)" in caught.value.message


def test_whole_numbers_that_the_model_would_round_are_refused_by_python_as_by_the_verb(folder: Path) -> None:
    x = np.ones((70, 5), np.int64)
    x[66, 2] = (1 << 24) + 1
    np.save(folder / "large.npy", x)
    done = predict(folder, "raw", "large.npy")
    assert done.rc == 65 and "but not 16777217" in done.error_lines[0] and "row=66" in done.error_lines[0], done.err
    model = mpitrain.load(folder / "raw")
    with pytest.raises(DataError, match="row=66: .* but not 16777217") as caught:
        model.predict(x)
    assert caught.value.row == 66
    assert model.predict(x.astype(np.float32)).shape == (70, 3)


def test_tokens_are_refused_with_advice_about_the_rows(folder: Path) -> None:
    done = predict(folder, "gpt", "unknown.npy")
    wanted = "token 9 is not in 0 ... 7: the model knows 8 tokens"
    assert done.rc == 65 and wanted in done.error_lines[0] and 'unknown.npy" dataset="x" row=70' in done.error_lines[0], done.err
    model = mpitrain.load(folder / "gpt")
    with pytest.raises(DataError, match=wanted):
        model.predict(np.load(folder / "unknown.npy"))
    done = predict(folder, "gpt", "long.npy")
    assert done.rc == 65 and "change the rows: one has at most 8 tokens" in done.error_lines[0], done.err
    assert "model.block" not in done.err
    with pytest.raises(ShapeError, match="; change the rows: one has at most 8 tokens$"):
        model.predict(np.load(folder / "long.npy"))


def test_a_folder_of_text_has_no_rows_to_predict(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab" * 50)
    import_text(tmp_path / "a.txt", tmp_path / "text")
    with pytest.raises(DataError, match=r"a text in one piece, .* give rows of tokens, integers of shape \(rows, length\)"):
        describe_rows(tmp_path / "text")


def test_python_speaks_of_its_own_arguments(folder: Path) -> None:
    model = mpitrain.load(folder / "own")
    with pytest.raises(UsageError, match='^keep "probs" is not one of outputs, classes, probabilities'):
        model.predict(np.ones((1, 5), np.uint8), "probs")
    with pytest.raises(UsageError, match="^inverse undoes data.target_transform"):
        model.predict(np.ones((1, 5), np.uint8), inverse=True)


def test_text_of_a_model_that_is_no_language_model_is_refused_before_its_table(folder: Path) -> None:
    with pytest.raises(ConfigError, match='the run\'s model, "mlp", is no language model'):
        main(["generate", str(folder / "own"), "--prompt", "a"])


def test_a_seed_below_0_is_refused() -> None:
    with pytest.raises(UsageError, match="--seed is -1, expected a whole number of 0 or more"):
        Sampling(seed=-1)


def test_standardise_refuses_images_of_other_channels() -> None:
    transform = Standardise()
    transform.load_state_dict({"mean": np.zeros((3, 1, 1)), "deviation": np.ones((3, 1, 1))})
    assert transform(np.ones((2, 3, 4, 4))).shape == (2, 3, 4, 4)
    with pytest.raises(ShapeError, match=r"rows have shape \(1, 4, 4\), and standardise .* 3 channels"):
        transform(np.ones((2, 1, 4, 4)))


def test_what_a_checkpoint_says_of_its_rows(folder: Path) -> None:
    saved = mpitrain.load(folder / "own")
    known = TrainingRow((5,), np.dtype(np.uint8))
    assert trained_on(saved.meta, saved.config) == known
    data = dict(saved.meta["experiment"]["data"]["training"])
    assert data.pop("row") == identity(describe_rows(folder / "u.h5", "x"))["row"] == {"shape": [5], "dtype": "|u1"}
    assert trained_on({"experiment": {"data": {"training": data}}}, saved.config) == known
    assert trained_on({}, saved.config) == TrainingRow() and not TrainingRow().other_kind(np.dtype(np.float32))
