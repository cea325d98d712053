"""Predictions of a run for the rows of a file: each row once, in its place, the same bytes on any ranks."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from launch import Result
from standing import mpirun

import mpitrain
from mpitrain.errors import ShapeError, StorageError, UsageError
from mpitrain.infer import output
from mpitrain.train.build import precision
from mpitrain.train.build.saved import load

KEYS = ("train.steps=12", "train.eval_every=4", "checkpoint.every=4", "checkpoint.keep=3", "data.transform=scale")
ROWS = 64 * 4 + 1                                        # the last chunk has one row


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    done = mpirun(1, "-m", "mpitrain", "train", *KEYS, "run.out=run", cwd=folder)
    assert done.rc == 0, done.err
    x = np.random.default_rng(0).integers(0, 17, (ROWS, 1, 8, 8)).astype(np.uint8)
    with h5py.File(folder / "rows.h5", "w") as file:
        file["fields/x"] = x
    np.savez(folder / "rows.npz", x=x)
    np.savez_compressed(folder / "packed.npz", rows=x)
    lines = [[f"p{i}" for i in range(64)], *x.reshape(ROWS, 64).tolist()]
    (folder / "rows.csv").write_text("\n".join(",".join(map(str, line)) for line in lines))
    said(predict(folder, 1, "rows.h5", "out1.h5"))            # what other predictions are compared with
    return folder


def predict(folder: Path, n: int, data: str, out: str, *more: str) -> Result:
    return mpirun(n, "-m", "mpitrain", "predict", "run", data, "--out", out, *more, cwd=folder)


def said(done: Result) -> dict[str, Any]:
    assert done.rc == 0, done.err
    found: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return found


def expected(folder: Path, x: Any, step: int | None = None) -> Any:
    """The logits in float64, by NumPy alone."""
    saved = load(folder / "run", step)
    own = {name: np.asarray(array, np.float64) for name, array in saved.model.state_dict().items()}
    (largest,) = saved.transforms.state_dict().values()
    h = x.reshape(len(x), -1) / largest
    for name in ("linear0", "linear1"):
        h = np.maximum(h @ own[f"{name}.weight"].T + own[f"{name}.bias"], 0)
    return h @ own["head.weight"].T + own["head.bias"]


def values(path: Path) -> Any:
    with h5py.File(path) as file:
        return file["predictions"][()]


def values_of(path: Path) -> Any:
    with h5py.File(path) as file:
        return file["x"][()]


@pytest.mark.skipif(precision.FLAG not in precision.cpu_flags(), reason="this CPU does not multiply numbers in bfloat16")
def test_a_run_in_bfloat16_predicts_in_python_what_the_verb_does(run: Path) -> None:
    done = mpirun(1, "-m", "mpitrain", "train", *KEYS, "train.precision=bfloat16", "run.out=low", cwd=run)
    assert done.rc == 0, done.err
    said(mpirun(1, "-m", "mpitrain", "predict", "low", "rows.npz", "--out", "low.npz", cwd=run))
    with np.load(run / "rows.npz") as rows, np.load(run / "low.npz") as found:
        assert np.array_equal(mpitrain.load(run / "low").predict(rows["x"]), found["predictions"])


def test_each_row_has_its_output_in_its_place_and_the_file_has_one_set_of_bytes(run: Path) -> None:
    found = [said(predict(run, n, "rows.h5", f"ranks{n}.h5")) for n in (1, 2)]
    assert len({json.dumps({**one, "out": ""}) for one in found}) == 1 and found[0]["rows"] == ROWS
    assert len({(run / f"ranks{n}.h5").read_bytes() for n in (1, 2)}) == 1
    with h5py.File(run / "rows.h5") as file:
        wanted = expected(run, file["fields/x"][()])
    assert np.abs(values(run / "ranks1.h5") - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert not list(run.glob("ranks*.part")) and not list(run.glob("ranks*.chunks"))


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 4, 6])
def test_more_ranks_give_the_same_bytes_also_more_than_there_are_chunks(run: Path, n: int) -> None:
    said(predict(run, n, "rows.h5", f"out{n}.h5"))
    assert (run / f"out{n}.h5").read_bytes() == (run / "out1.h5").read_bytes()


def test_python_and_the_verb_give_the_same_bits(run: Path) -> None:
    with h5py.File(run / "rows.h5") as file:
        x = file["fields/x"][()]
    model = mpitrain.load(run / "run")
    assert np.array_equal(model.predict(x), values(run / "out1.h5"))
    logits = model.predict(x)
    for first, n in ((0, 1), (63, 2), (100, 7), (100, 90), (ROWS - 1, 1)):               # whatever is beside a row
        assert np.array_equal(model.predict(x[first:first + n]), logits[first:first + n])
    assert np.array_equal(model.predict(x, "classes"), logits.argmax(axis=1))
    assert np.abs(model.predict(x, "probabilities").sum(axis=1) - 1).max() < 1e-6
    with pytest.raises(ShapeError, match="at least one, found an array of shape"):
        model.predict(x[:0])
    with pytest.raises(ShapeError, match="rows are numbers"):
        model.predict(np.array(["a"]))
    with pytest.raises(ShapeError):
        model.predict(x[..., :6])


@pytest.mark.slow
@pytest.mark.parametrize("name, more", [("rows.npz", ()), ("packed.npz", ("--x", "rows")), ("rows.csv", ())])
def test_other_formats_give_what_hdf5_gives(run: Path, name: str, more: tuple[str, ...]) -> None:
    out = {"rows.npz": "npz.npz", "packed.npz": "packed.csv", "rows.csv": "csv.h5"}[name]
    said(predict(run, 2, name, out, *more))
    wanted = values(run / "out1.h5")
    if out.endswith(".npz"):
        found = np.load(run / out)["predictions"]
    elif out.endswith(".csv"):
        found = np.loadtxt(run / out, np.float32, delimiter=",", skiprows=1)
    else:
        found = values(run / out)
    assert np.array_equal(found, wanted) and found.dtype == np.float32


HALVES = ("mesh.pp=2",), ("mesh.tp=2",), ("comm.sharding=parameters",), ("comm.sharding=parameters", "comm.node_shared=true")


@pytest.mark.slow
@pytest.mark.parametrize("keys", HALVES, ids=lambda keys: keys[0])
def test_any_mesh_gives_the_rows_of_one_rank(run: Path, keys: tuple[str, ...]) -> None:
    said(predict(run, 2, "rows.h5", f"{keys[-1]}.h5", *keys))
    found, wanted = values(run / f"{keys[-1]}.h5"), values(run / "out1.h5")
    if keys[0] == "mesh.tp=2":
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    else:
        assert np.array_equal(found, wanted)


@pytest.mark.slow
def test_a_norm_is_folded_whatever_the_stages_and_the_sharding(run: Path) -> None:
    """The cut asked for lies between the first convolution and its norm."""
    keys = ("model.name=resnet20", "model.channels=1", "train.steps=3", "data.transform=scale", "comm.sharding=parameters",
            "train.batch_size=16", "train.loss=cross_entropy")
    (run / "resnet.toml").write_text("")
    done = mpirun(2, "-m", "mpitrain", "train", "resnet.toml", "data.path=digits", *keys, "run.out=resnet", cwd=run)
    assert done.rc == 0, done.err
    with h5py.File(run / "few.h5", "w") as file, h5py.File(run / "rows.h5") as rows:
        file["x"] = rows["fields/x"][:70]
    found = {}
    for n, more in ((1, ()), (2, ()), (2, ("mesh.pp=2",)), (2, ("mesh.pp=2", "mesh.stages=[2,13]"))):
        done = mpirun(n, "-m", "mpitrain", "predict", "resnet", "few.h5", "--out", "folded.h5", "--overwrite", *more, cwd=run)
        found[n, *more] = said(done)["sha256"]
    assert len(set(found.values())) == 1, found
    assert np.array_equal(mpitrain.load(run / "resnet").predict(values_of(run / "few.h5")), values(run / "folded.h5"))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_classes_are_those_of_the_largest_output_on_ranks_that_share_it(run: Path, n: int) -> None:
    """Three ranks have parts of the ten outputs that are not of one size."""
    said(predict(run, n, "rows.h5", f"classes{n}.h5", "--as", "classes", f"mesh.tp={n}", 'mesh.plan={"head"="vocabulary"}'))
    assert np.array_equal(values(run / f"classes{n}.h5"), values(run / "out1.h5").argmax(axis=1))


def test_a_killed_job_is_gone_on_with_where_it_was(run: Path) -> None:
    """What a job leaves that is killed: chunks that are marked are not computed again, and all others are."""
    whole = (run / "out1.h5").read_bytes()
    done = mpirun(2, str(Path(__file__).with_name("killed_program.py")), "run", "rows.h5", "killed.h5", cwd=run)
    assert done.rc != 0 and (run / "killed.h5.part").exists() and not (run / "killed.h5").exists()
    marks = (run / "killed.h5.chunks").read_text().partition("\n")[2]
    assert 0 < marks.count("1") < 5
    refused = predict(run, 1, "rows.h5", "killed.h5")
    assert refused.rc == 73 and "a prediction was interrupted there" in refused.error_lines[0]
    refused = predict(run, 1, "rows.h5", "killed.h5", "--resume", "--as", "classes")
    assert refused.rc == 73 and "another prediction" in refused.error_lines[0]
    with open(run / "killed.h5.part", "r+b") as part:                       # a marked row that differs stays as it is
        place = whole.index(values(run / "out1.h5")[0].tobytes())
        part.seek(place + marks.index("1") * 64 * 40)
        part.write(b"abcd")
    said(predict(run, 3, "rows.h5", "killed.h5", "--resume"))
    found, wanted = values(run / "killed.h5"), values(run / "out1.h5")
    (row,) = np.flatnonzero((found != wanted).any(axis=1))
    assert row == marks.index("1") * 64 and found[row, 0].tobytes() == b"abcd"
    assert not (run / "killed.h5.part").exists() and not (run / "killed.h5.chunks").exists()


def test_outputs_have_the_units_of_the_targets_again(run: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(256, 5)).astype(np.float32)
    y = (1000 + 50 * x[:, :1] * [1, 2] + rng.normal(size=(256, 2))).astype(np.float32)
    with h5py.File(run / "units.h5", "w") as file:
        file["x"], file["y"] = x, y
    keys = ("model.inputs=5", "model.hidden=[16]", "model.outputs=2", "data.path=units.h5", "data.validation=0", "train.loss=mse",
            "data.transform=standardise", "data.target_transform=standardise", "train.steps=150", "optimizer.lr=0.02")
    done = mpirun(1, "-m", "mpitrain", "train", *keys, "run.out=units", cwd=run)
    assert done.rc == 0, done.err
    said(mpirun(2, "-m", "mpitrain", "predict", "units", "units.h5", "--out", "units_out.h5", "--inverse", cwd=run))
    model = mpitrain.load(run / "units")
    assert np.array_equal(model.predict(x, inverse=True), values(run / "units_out.h5"))
    wanted = model.predict(x).astype(np.float64) * y.std(axis=0, dtype=np.float64) + y.mean(axis=0, dtype=np.float64)
    assert np.abs(values(run / "units_out.h5") - wanted).max() < 1e-2
    assert np.sqrt(((values(run / "units_out.h5") - y) ** 2).mean()) < 20 < y.std(axis=0).min()
    with pytest.raises(UsageError, match="this run was trained without"):
        mpitrain.load(run / "run").predict(np.zeros((1, 64)), inverse=True)
    with pytest.raises(UsageError, match="trained with a loss of classes"):
        model.predict(x, "classes")


@pytest.mark.slow
def test_a_language_model_gives_the_logits_of_each_position_on_any_mesh(run: Path) -> None:
    rng = np.random.default_rng(2)
    with h5py.File(run / "text.h5", "w") as file:
        file["tokens"] = rng.integers(0, 7, 4000).astype(np.uint8)
    with h5py.File(run / "texts.h5", "w") as file:
        file["x"] = rng.integers(0, 7, (70, 8)).astype(np.uint8)
        file["y"] = np.zeros((70, 8), np.float32)
    keys = ("model.name=gpt", "model.vocabulary=8", "model.block=8", "model.width=16", "model.heads=2", "model.layers=2",
            "data.path=text.h5", "data.transform=[]", "data.validation=0", "train.loss=cross_entropy", "train.steps=5")
    (run / "gpt.toml").write_text("")
    done = mpirun(1, "-m", "mpitrain", "train", "gpt.toml", *keys, "run.out=gpt", cwd=run)
    assert done.rc == 0, done.err
    found = {}
    for mesh in ("dp", "pp", "tp", "cp"):
        done = mpirun(2, "-m", "mpitrain", "predict", "gpt", "texts.h5", "--out", f"gpt-{mesh}.h5", "--x", "x", f"mesh.{mesh}=2",
                      cwd=run)
        assert said(done)["shape"] == [8, 8]
        found[mesh] = values(run / f"gpt-{mesh}.h5")
    with h5py.File(run / "texts.h5") as file:
        x = file["x"][()]
    wanted = mpitrain.load(run / "gpt").predict(x)
    assert np.array_equal(found["dp"], wanted) and np.array_equal(found["pp"], wanted)
    for mesh in ("tp", "cp"):
        assert np.abs(found[mesh] - wanted).max() < 1e-5 * np.abs(wanted).max(), mesh
    refused = mpirun(1, "-m", "mpitrain", "predict", "gpt", "texts.h5", "--out", "bad.h5", "--x", "y", cwd=run)
    assert refused.rc == 65 and "a language model takes rows of tokens" in refused.error_lines[0]


def test_rows_that_are_not_finite_are_predicted_and_counted(run: Path) -> None:
    x = np.ones((130, 64), np.float32)
    x[3, 5], x[70, 0], x[129] = np.nan, np.inf, -np.inf
    np.savez(run / "nan.npz", x=x)
    (run / "nan.h5").write_text("an older file")
    done = said(predict(run, 2, "nan.npz", "nan.h5", "--overwrite"))
    found = values(run / "nan.h5")
    assert (done["nonfinite_inputs"], done["nonfinite_outputs"]) == (3, int((~np.isfinite(found).all(axis=1)).sum()))
    assert np.array_equal(found, mpitrain.load(run / "run").predict(x), equal_nan=True)
    assert np.isnan(found[3]).any() and np.isfinite(found[[0, 4, 69, 71]]).all()


def test_a_full_disk_is_told_before_anything_is_computed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    rows = output.Rows(run / "full.h5", (100, 10), "<f4", 64, "0" * 64, {})
    with pytest.raises(StorageError, match="reserving space failed: .*ENOSPC.*; free some space, or choose another --out"):
        output.begin(rows, resume=False)
    assert not list(run.glob("full*"))


@pytest.mark.parametrize("ending", [".csv", ".npz"])
def test_a_disk_that_fills_while_the_output_is_written_keeps_what_was_computed(run: Path, ending: str,
                                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    rows = output.Rows(run / f"half{ending}", (100, 10), "<f4", 64, "0" * 64, {})
    start, _ = output.begin(rows, resume=False)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="writing the output failed: .*ENOSPC"):
        output.finish(rows, start)
    assert sorted(path.name for path in run.glob(f"half{ending}*")) == [f"half{ending}.chunks", f"half{ending}.part"]
    monkeypatch.undo()
    output.finish(rows, start)
    assert [path.name for path in run.glob(f"half{ending}*")] == [f"half{ending}"]


def bad(run: Path) -> list[tuple[tuple[str, ...], int, str]]:
    out = ("--out", "bad.h5")
    (run / "nolines.csv").write_text("")
    (run / "words.csv").write_text("a,b\n1,2\n3,x\n")
    (run / "ragged.csv").write_text("1,2\n3\n")
    np.savez(run / "shape.npz", x=np.zeros((3, 5), np.float32))
    np.savez(run / "objects.npz", x=np.array([None]))
    np.savez(run / "none.npz", x=np.zeros((0, 64), np.float32))
    np.savez(run / "words.npz", x=np.array(["a"]))
    return [
        (("run", "gone.h5", *out), 66, "no such file or folder"),
        (("run", "gone.npz", *out), 66, "the data file is not there"),
        (("none", "rows.h5", *out), 66, "config.toml"),
        (("run", "rows.h5", *out, "--step", "5"), 66, "there is no checkpoint of step 5; those of this run are of 4, 8, 12"),
        (("run", "rows.h5", *out, "--x", "fields/y"), 65, 'no dataset "fields/y" ("/fields" holds: x)'),
        (("run", "rows.npz", *out, "--x", "y"), 65, 'no array "y" (there: x); name one with --x'),
        (("run", "rows.csv", *out, "--x", "p0,q"), 65, 'no column "q"'),
        (("run", "shape.npz", *out), 65, "change the rows to such as the model was trained on (uint8 of shape (1, 8, 8))"),
        (("run", "objects.npz", *out), 65, "Python objects, which are never loaded"),
        (("run", "none.npz", *out), 65, "there are no rows: the shape is (0, 64)"),
        (("run", "words.npz", *out), 65, "the values are <U1; expected integers or floats"),
        (("run", "nolines.csv", *out), 65, "the table is empty"),
        (("run", "words.csv", *out), 65, 'row=1: "x" in column "b" is no number'),
        (("run", "ragged.csv", *out), 65, "1 columns, but the first line has 2"),
        (("run", "rows.h5", "--out", "bad.txt"), 73, "let it end in .h5, .hdf5, .npz, .csv"),
        (("run", "rows.h5", "--out", "nowhere/bad.h5"), 73, "there is no folder nowhere"),
        (("run", "rows.h5", "--out", "out1.h5"), 73, "--overwrite to replace it"),
        (("run", "rows.h5", "--out", "rows.h5", "--overwrite"), 73, "the output is the input itself"),
        (("run", "rows.h5", *out, "--as", "labels"), 64, '--as "labels" is not one of'),
        (("run", "rows.h5", *out, "--resume", "--overwrite"), 64, "not allowed with"),
    ]


@pytest.mark.slow
def test_what_cannot_be_predicted_is_refused_in_a_line_and_leaves_nothing(run: Path) -> None:
    for arguments, code, text in bad(run):
        done = mpirun(1, "-m", "mpitrain", "predict", *arguments, cwd=run)
        assert done.rc == code and len(done.error_lines) == 1 and text in done.error_lines[0], (arguments, done)
        assert not list(run.glob("bad*"))
