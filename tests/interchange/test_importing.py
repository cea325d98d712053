"""What `import` asks for, and what it says of a folder that is there; without PyTorch and without a run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from saved_models import fresh

from mpitrain.cli import main
from mpitrain.data import Transforms
from mpitrain.errors import AccessError, ConfigError, NumericsError, OtherModelError, OutputError
from mpitrain.interchange import safetensors
from mpitrain.interchange.exporting import Wanted, export
from mpitrain.train.build import adapted
from mpitrain.train.build.model import make_model
from mpitrain.train.build.saved import load

SIZES = {"inputs": 5, "hidden": [7, 4], "outputs": 3}


def test_a_folder_that_is_there_is_refused_with_the_flags_of_this_verb(tmp_path: Path) -> None:
    export(fresh("mlp", **SIZES), Wanted(tmp_path / "x.safetensors"))
    words = ["import", str(tmp_path / "x.safetensors"), "--out", str(tmp_path / "run")]
    assert main(words) == 0
    with pytest.raises(OutputError, match="not empty") as caught:
        main(words)
    assert "--overwrite deletes the run that is there; or set --out to another folder" in caught.value.message
    assert main([*words, "--overwrite"]) == 0
    shutil.move(tmp_path / "run", tmp_path / "real")
    for make, error, said in ((lambda path: path.symlink_to("real"), OutputError, "set --out to the folder itself"),
                              (Path.touch, OutputError, "set --out to another name"),
                              (lambda path: (path.mkdir(), path.chmod(0o777)), AccessError, "set --out to another folder")):
        (tmp_path / "run").unlink(missing_ok=True)
        make(tmp_path / "run")
        with pytest.raises(error, match=said) as caught:
            main(words)
        assert "run.out" not in caught.value.message and "--resume" not in caught.value.message


def test_tensors_with_nan_are_refused_and_large_ones_are_not(tmp_path: Path) -> None:
    """Also where the sum of finite numbers is beyond float32."""
    saved = fresh("mlp", **SIZES)
    words = ["import", str(tmp_path / "x.safetensors"), "--out", str(tmp_path / "run"), "--overwrite"]
    for value in (3e38, np.nan):
        saved.model.parameters()[0].array[...] = value
        export(saved, Wanted(tmp_path / "x.safetensors", overwrite=True))
        if value == 3e38:
            assert main(words) == 0
        else:
            with pytest.raises(NumericsError, match="is not finite, so nothing was written; take a file or a checkpoint whose"):
                main(words)


def test_adapters_are_not_written_into_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(OutputError, match="is not empty; set --out to another"):
        adapted.write(tmp_path, fresh("mlp", **SIZES))


@pytest.mark.parametrize(("names", "ending"), [("pytorch", "pt"), ("own", "pt"), ("own", "safetensors")])
@pytest.mark.parametrize("hidden", [[7, 4], []])
def test_the_sizes_of_an_mlp_are_those_of_its_tensors(tmp_path: Path, names: str, ending: str, hidden: list[int]) -> None:
    saved = fresh("mlp", inputs=5, hidden=hidden, outputs=3)
    file = tmp_path / f"x.{ending}"
    export(saved, Wanted(file, names=names))
    if ending == "safetensors":                                                  # as of another program: nothing but tensors
        safetensors.write(file, {name: at.values() for name, at in safetensors.read(file).tensors.items()}, {}, overwrite=True)
    words = ["import", str(file), "--names", names, "--out", str(tmp_path / "run"), "model.name=mlp"]
    assert main(words) == 0
    back = load(tmp_path / "run")
    assert back.hashes() == saved.hashes() and back.config.model.arguments["hidden"] == hidden
    with pytest.raises(OtherModelError, match="has shape"):                      # a key that is given counts
        main([*words, "--overwrite", "model.outputs=4"])


def test_tensors_that_do_not_follow_each_other_say_no_sizes(tmp_path: Path) -> None:
    safetensors.write(tmp_path / "x", {"linear0.weight": np.ones((4, 5)), "head.weight": np.ones((3, 9))}, {})
    with pytest.raises(ConfigError, match="inputs"):
        main(["import", str(tmp_path / "x"), "--names", "pytorch", "--out", str(tmp_path / "run"), "model.name=mlp"])


FILES = ["safetensors", pytest.param("onnx", marks=pytest.mark.skipif(find_spec("onnx") is None, reason="needs onnx"))]


@pytest.mark.parametrize("ending", FILES)
def test_a_model_that_was_cut_by_the_shapes_of_its_parameters_comes_back(tmp_path: Path, ending: str) -> None:
    shapes = {"linear0.weight": [4, 5], "linear0.bias": [4], "linear1.weight": [4, 4]}
    cut = fresh("mlp", **SIZES).made_into(fresh("mlp", **SIZES).model, model={"shapes": shapes})
    model = make_model(cut.config)
    model.initialize(5)
    cut = cut.made_into(model.eval().requires_grad_(False))
    export(cut, Wanted(tmp_path / f"x.{ending}"))
    assert main(["import", str(tmp_path / f"x.{ending}"), "--out", str(tmp_path / "run")]) == 0
    back = load(tmp_path / "run")
    assert back.hashes() == cut.hashes() and back.config.model.shapes == shapes


@pytest.mark.parametrize("ending", FILES)
def test_what_targets_were_made_into_comes_back_and_is_undone(tmp_path: Path, ending: str) -> None:
    saved = fresh("mlp", **SIZES)
    state = {"0.scale.largest": np.array(8.0), "target.0.standardise.mean": np.array([1.0, 2.0, 3.0]),
             "target.0.standardise.deviation": np.array([10.0, 20.0, 30.0])}
    saved = replace(saved.made_into(saved.model, data={"transform": ["scale"], "target_transform": ["standardise"]}),
                    transforms=Transforms(["scale"], targets=["standardise"]))
    saved.transforms.load_state_dict(state)
    told: list[str] = []
    export(saved, Wanted(tmp_path / f"x.{ending}"), told.append)
    assert main(["import", str(tmp_path / f"x.{ending}"), "--out", str(tmp_path / "run")]) == 0
    back = load(tmp_path / "run").transforms
    assert back.targets is not None and back.targets.inverse(np.zeros((1, 3), np.float32)).tolist() == [[1, 2, 3]]
    assert {name: value.tolist() for name, value in back.state_dict().items()} == \
        {name: value.tolist() for name, value in state.items()}
    assert any("data.target_transform (standardise): outputs are" in line for line in told) == (ending == "onnx")
