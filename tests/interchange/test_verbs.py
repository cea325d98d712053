"""`export` and `import` of real runs: what comes back evaluates to the same bits, on any ranks; every mistake is one line."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from saved_models import fresh
from standing import mpirun

import mpitrain
from mpitrain.cli import main
from mpitrain.errors import ConfigError, DataError, MissingError, OtherModelError, OutputError, UsageError
from mpitrain.interchange import safetensors
from mpitrain.interchange.exporting import Wanted, export
from mpitrain.train.build.saved import load

KEYS = ("train.steps=4", "data.transform=standardise", "run.out=run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run/, run.safetensors, and back/, imported from it; and run.onnx and graph/, where there is onnx."""
    folder = tmp_path_factory.mktemp("interchange")
    done = mpirun(2, "-m", "mpitrain", "train", *KEYS, cwd=folder)
    assert done.rc == 0, done.err
    assert main(["export", str(folder / "run"), str(folder / "run.safetensors")]) == 0
    assert main(["import", str(folder / "run.safetensors"), "--out", str(folder / "back")]) == 0
    if find_spec("onnx"):
        assert main(["export", str(folder / "run"), str(folder / "run.onnx")]) == 0
        assert main(["import", str(folder / "run.onnx"), "--out", str(folder / "graph")]) == 0
    return folder


@pytest.mark.skipif(find_spec("onnx") is None, reason="needs onnx (pip install mpitrain[onnx])")
def test_a_run_that_comes_back_from_a_graph_predicts_the_same_of_rows_as_they_are(folder: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 17, (3, 1, 8, 8), np.uint8)
    run, back = (mpitrain.load(folder / name) for name in ("run", "graph"))
    assert np.array_equal(run.predict(rows), back.predict(rows)) and back.hashes() == run.hashes()


def test_a_run_comes_back_with_its_hashes_its_transforms_and_its_metrics(folder: Path) -> None:
    run, back = (json.loads((folder / name / "run.json").read_text()) for name in ("run", "back"))
    assert back["parameters_sha256"] == run["parameters_sha256"] and back["status"] == "made"
    before, after = (load(folder / name).transforms.state_dict() for name in ("run", "back"))
    assert set(before) == set(after) and all(np.array_equal(after[name], value) for name, value in before.items())
    found = [mpirun(n, "-m", "mpitrain", "evaluate", name, *more, cwd=folder) for n, name, more in (
        (1, "run", ()), (2, "back", ("data.path=digits", "data.validation=0.2")))]
    assert found[0].out == found[1].out and '"step": 4' in found[0].out, found[1].err


def test_a_run_without_data_says_so(folder: Path) -> None:
    done = mpirun(2, "-m", "mpitrain", "evaluate", "back", cwd=folder)
    assert done.rc == 78 and "data.path is missing" in done.err and len(done.error_lines) == 1


def test_an_imported_model_starts_a_run(folder: Path) -> None:
    done = mpirun(2, "-m", "mpitrain", "train", "train.steps=1", "optimizer.lr=1e-30", "data.transform=standardise",
                  "optimizer.weight_decay=0.0", "optimizer.warmup_steps=0", "run.out=next", "model.init_from=back", cwd=folder)
    assert done.rc == 0, done.err
    assert load(folder / "next").hashes() == load(folder / "back").hashes()


@pytest.mark.slow
def test_a_gpt_with_a_head_of_its_own_is_cut_over_ranks(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be, or not to be: that is the question. " * 40)
    done = mpirun(1, "-m", "mpitrain", "data", "import", "text", "text", "--out", "corpus", cwd=tmp_path)
    assert done.rc == 0, done.err
    (tmp_path / "gpt.toml").write_text('[model]\nname = "gpt"\n'
                                       'layers = 2\nheads = 2\nwidth = 16\nblock = 8\nvocabulary = 128\n'
                                       'bias = true\nactivation = "gelu_tanh"\ntied = false\neps = 1e-6\n'
                                       '[data]\npath = "corpus"\n'
                                       'validation = "tail:0.2"\n[train]\nsteps = 3\nbatch_size = 4\n')
    found = []
    for ranks, mesh in ((1, ()), (2, ("mesh.tp=2",)), (2, ("mesh.pp=2",))):
        done = mpirun(ranks, "-m", "mpitrain", "train", "gpt.toml", f"run.out=run{len(found)}", *mesh, cwd=tmp_path)
        assert done.rc == 0, done.err
        found.append(load(tmp_path / f"run{len(found)}").model.state_dict())
    for other in found[1:]:
        for name, value in found[0].items():
            assert np.allclose(value, other[name], rtol=0, atol=1e-4), name


@pytest.mark.slow
def test_each_rank_has_the_memory_of_its_part_of_an_imported_model(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be, or not to be: that is the question. " * 40)
    done = mpirun(1, "-m", "mpitrain", "data", "import", "text", "text", "--out", "corpus", cwd=tmp_path)
    assert done.rc == 0, done.err
    export(fresh("gpt", layers=8, heads=8, width=640, block=16, vocabulary=128), Wanted(tmp_path / "m.safetensors"))
    words = ["import", str(tmp_path / "m.safetensors"), "--out", str(tmp_path / "run"), "data.validation=tail:0.2",
             f"data.path={tmp_path / 'corpus'}"]
    assert main(words) == 0
    whole, peaks = (tmp_path / "m.safetensors").stat().st_size / 1024, {}
    for mesh in ((), ("mesh.pp=2",), ("mesh.tp=2",)):
        done = mpirun(1 + len(mesh), str(Path(__file__).with_name("memory_program.py")), "evaluate", "run", *mesh, cwd=tmp_path)
        assert done.rc == 0, done.err
        peaks[mesh] = max(int(line.split()[1]) for line in done.err.splitlines() if line.startswith("peak "))
    assert all(peaks[()] - peaks[mesh] > 0.35 * whole for mesh in peaks if mesh), peaks


def test_mistakes_are_refused_in_a_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "cut").write_bytes((folder / "run.safetensors").read_bytes()[:-8])
    whole = safetensors.read(folder / "run.safetensors")
    changed = {name: stored.values() + (name == "head.bias") for name, stored in whole.tensors.items()}
    safetensors.write(folder / "changed", changed, whole.metadata, overwrite=True)
    for words, error, said in (
            ("export run run.safetensors", OutputError, "--overwrite"), ("export run x.gguf", UsageError, "safetensors"),
            ("export run x.safetensors --names gpt2", ConfigError, 'has none for "linear0.weight"'),
            ("export none x.pt", MissingError, "run folder"), ("export run x.onnx --input 3x0", UsageError, "3x224x224"),
            ("export run none/x.pt", OutputError, "no folder"),
        ("export run x.pt --step 3", MissingError, "no checkpoint of step 3"),
            ("import none --out x", MissingError, "no such file"), ("import cut --out x", DataError, "cut off"),
            ("import changed --out x", DataError, "damaged, or was changed"),
            ("import run.safetensors --out back", OutputError, "not empty"),
            ("import run.safetensors --out x model.outputs=9", OtherModelError, "the model wants"),
            ("import run.safetensors", UsageError, "--out")):
        with pytest.raises(error, match=said) as caught:
            main(words.split())
        assert "\n" not in str(caught.value) and not (folder / "x").exists()


def test_without_the_package_onnx_a_line_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"pip install .mpitrain\[onnx\]"):
        main(["export", str(folder / "run"), str(folder / "x.onnx")])
