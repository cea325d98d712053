"""A trained model is judged, and used, by data whose numbers stand for what they did when it was trained."""

from __future__ import annotations

from pathlib import Path

from launch import mpirun
from runs import ok, refused, train, write

from mpitrain.data.importers import import_csv

CONFIG = """
[model]
name = "mlp"
hidden = [4]
[data]
path = "all"
validation = 0.5
[train]
steps = 2
batch_size = 4
[log]
progress_s = 0
"""


def make(folder: Path, name: str, cities: str, animals: str) -> None:
    rows = [f"{i},{city},{animal}" for i, (city, animal) in enumerate(zip(cities.split() * 4, animals.split() * 4))]
    (folder / "a.csv").write_text("\n".join(["age,city,animal", *rows]) + "\n")
    import_csv(folder / "a.csv", folder / name, label="animal", categories=["city"])


def test_data_whose_numbers_stand_for_other_names_are_refused_after_training_too(tmp_path: Path) -> None:
    make(tmp_path, "all", "oslo rome wien", "cat dog cat")
    make(tmp_path, "animals", "oslo rome wien", "dog eel dog")
    make(tmp_path, "cities", "oslo wien wien", "cat dog cat")
    config = write(tmp_path, CONFIG)
    ok(train(1, config, "run.out=r"))
    refused(train(1, config, "run.out=s", "data.validation=animals"), 65, "the class 0 is \"dog\"", "\"cat\"", "both alike")
    ok(mpirun(1, "-m", "mpitrain", "evaluate", "r", cwd=tmp_path))
    for name, words in (("animals", "the class 0 is \"dog\""), ("cities", "the code 1 of the column \"city\" is \"wien\"")):
        refused(mpirun(2, "-m", "mpitrain", "evaluate", "r", f"data.path={name}", cwd=tmp_path), 65, "rank=0/2", words)
    ok(mpirun(1, "-m", "mpitrain", "predict", "r", "animals", "--out", "p.h5", cwd=tmp_path))      # Targets are not looked at.
    refused(mpirun(2, "-m", "mpitrain", "predict", "r", "cities", "--out", "q.h5", cwd=tmp_path), 65, "the code 1", "\"rome\"")
    assert not (tmp_path / "q.h5").exists()
