"""What a saved model does on other rows than it was trained on is found with its own statistics, not with those of these rows."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from runs import SMALL

from mpitrain.cli import main
from mpitrain.data import Dataset, describe
from mpitrain.errors import ConfigError
from mpitrain.train.build.saved import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose inputs are divided by 16, and brighter.h5: the same digits, ten times as bright."""
    found = tmp_path_factory.mktemp("statistics")
    (found / "run.toml").write_text(SMALL)
    main(["train", str(found / "run.toml"), "data.transform=scale", f"run.out={found / 'run'}", "train.steps=2",
          "train.eval_every=2", "optimizer.warmup_steps=0"])
    digits = Dataset(describe("digits"))
    x, y = digits.read(np.arange(len(digits)))
    with h5py.File(found / "brighter.h5", "w") as file:
        file["x"], file["y"] = x.astype(np.float32) * 10, y
    return found


def test_the_range_of_inputs_is_found_with_the_models_own_transforms(folder: Path) -> None:
    found = []
    for name, path in (("same", "digits"), ("brighter", str(folder / "brighter.h5"))):
        assert main(["quantize", str(folder / "run"), "--format", "int8-static", "--least", "0", "--out", str(folder / name),
                     f"data.path={path}"]) == 0
        found.append(float(load(folder / name).model.state_dict()["linear0.input_scale"]))
    assert found[1] == pytest.approx(10 * found[0], rel=0.07)            # bins are 3 % wide


@pytest.mark.parametrize("verb", ["train", "inspect"])
def test_a_teacher_that_would_see_other_inputs_than_its_own_is_refused(folder: Path, verb: str) -> None:
    words = [verb, str(folder / "run.toml"), "data.transform=scale", f"distil.teacher={folder / 'run'}", "train.steps=2",
             "train.eval_every=2", "optimizer.warmup_steps=0"]
    with pytest.raises(ConfigError, match="distil.teacher has learned other statistics.* differ by 900% of their size"):
        main([*words, f"data.path={folder / 'brighter.h5'}", f"run.out={folder / 'no'}"])
    assert not (folder / "no").exists()
    assert main([*words, "run.seed=3", f"run.out={folder / 'student'}"]) == 0           # another split of the same rows
