"""A verb that makes a run of a run, or of a file, leaves what it reads as it is, wherever --out points."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from mpitrain.cli import main
from mpitrain.config import made_config
from mpitrain.data import Transforms
from mpitrain.errors import OutputError
from mpitrain.train.build.adapted import write
from mpitrain.train.build.model import make_model
from mpitrain.train.build.saved import SavedModel, load, save

MODEL = {"name": "mlp", "inputs": 64, "hidden": [32], "outputs": 10}
LORA = {"rank": 2, "layers": ["linear0"]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made(tmp_path / "all" / "run")


def made(folder: Path, **sections: object) -> Path:
    config = made_config({"model": MODEL, "data": {"path": "digits"}, "train": {"epochs": 1}, **sections}, [], "run")
    model = make_model(config)
    model.initialize(3)
    folder.parent.mkdir(exist_ok=True)
    saved = SavedModel(model.eval().requires_grad_(False), config, 7, Transforms((), None), {"seed": 0})
    return save(folder, saved, {"by": "a test"})


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(out: Path, *words: str | Path, source: Path) -> None:
    before = content(source)
    with pytest.raises(OutputError, match="what the model is read from") as found:
        main([*map(str, words), "--out", str(out), "--overwrite"])
    assert "\n" not in found.value.message and before and content(source) == before


VERBS = {"quantize": ["--format", "int8", "--least", "0"], "cut": ["--work", "0.5"],
         "factor": ["--layers", "linear0", "--rank", "2"]}


@pytest.mark.parametrize("verb", VERBS)
def test_a_run_is_not_written_over_its_source(run: Path, verb: str) -> None:
    refused(run, verb, run, *VERBS[verb], source=run)


def test_not_by_way_of_links_nor_into_it_nor_around_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, other = run.parent / "link", run.parent / "other"
    link.symlink_to(run)
    other.mkdir()
    (other / "config.toml").symlink_to(run / "config.toml")
    (other / "checkpoints").symlink_to(run / "checkpoints")
    monkeypatch.chdir(run)
    for source, out in ((run, link), (link, run), (other, run), (run, run / "checkpoints"), (run, run / "few"), (run, run.parent),
                        (run, Path("."))):
        refused(out, "quantize", source, *VERBS["quantize"], source=run)
    assert not (run / "few").exists()


def test_merge_leaves_the_run_and_the_adapters(run: Path) -> None:
    both = made(run.parent / "both", model={**MODEL, "init_from": str(run)}, lora=LORA)
    refused(both, "merge", both, source=both)
    adapter = run.parent / "merged" / "checkpoints"
    adapter.parent.mkdir()
    base = load(both)
    for name, parameter in base.model.named_parameters():
        parameter.array[...] = 0 if name.endswith(".up") else parameter.array
    write(adapter, base)
    refused(adapter.parent, "merge", run, "--adapter", adapter, source=adapter)


def test_import_leaves_the_run_that_its_file_lies_in(run: Path) -> None:
    file = run / "checkpoints" / "model.safetensors"
    assert main(["export", str(run), str(file)]) == 0
    refused(run, "import", file, source=run)
    shutil.move(file, run.parent / "model.safetensors")
    assert main(["import", str(run.parent / "model.safetensors"), "--out", str(run), "--overwrite"]) == 0


def test_a_folder_beside_it_is_written(run: Path) -> None:
    out = run.with_name("run-int8")                        # a name that begins with that of the source
    for more in ([], ["--overwrite"]):
        assert main(["quantize", str(run), *VERBS["quantize"], "--out", str(out), *more]) == 0
    assert np.isfinite(load(out).model(np.ones((1, 64), np.float32)).array).all()
