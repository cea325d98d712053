"""What `import` asks for, and what it says of a folder that is there; without PyTorch and without a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from saved_models import fresh

from mpitrain.cli import main
from mpitrain.errors import AccessError, OutputError
from mpitrain.interchange.exporting import Wanted, export
from mpitrain.train.build import adapters

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


def test_adapters_are_not_written_into_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(OutputError, match="is not empty; set --out to another"):
        adapters.write(tmp_path, fresh("mlp", **SIZES))
