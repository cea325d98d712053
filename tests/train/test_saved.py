"""A model is taken out of a run, and a run folder made from one is a run as any other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from standing import mpirun

from mpitrain.errors import MissingError, OutputError, UsageError
from mpitrain.train.build.saved import load, save

KEYS = ("train.steps=12", "checkpoint.every=4", "checkpoint.keep=3", "train.eval_every=4", "data.transform=standardise")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    done = mpirun(2, "-m", "mpitrain", "train", *KEYS, "run.out=run", cwd=folder)
    assert done.rc == 0, done.err
    return folder / "run"


def test_the_newest_one_is_that_of_run_json(run: Path) -> None:
    saved = load(run)
    about = json.loads((run / "run.json").read_text())
    assert saved.step == 12 and saved.hashes()["parameters_sha256"] == about["parameters_sha256"]
    assert not any(module.training for _, module in saved.model.named_modules())
    assert not any(parameter.requires_grad for parameter in saved.model.parameters())


def test_a_step_and_the_best_are_chosen_and_others_refused_with_those_there_are(run: Path) -> None:
    assert load(run, 4).step == 4
    losses = {line["step"]: line["loss"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
              if line.get("split") == "validation"}
    assert load(run, "best").step == min(losses, key=lambda step: losses[step])
    with pytest.raises(MissingError, match="no checkpoint of step 5; those of this run are of 4, 8, 12"):
        load(run, 5)
    for wrong in (-1, "newest", 2.0, True):
        with pytest.raises(UsageError, match="step is a number of 0 or more"):
            load(run, wrong)                                                     # type: ignore[arg-type]


def test_a_folder_made_from_it_evaluates_to_the_same_bits(run: Path, tmp_path: Path) -> None:
    saved = load(run, 8)
    save(tmp_path / "made", saved, {"by": "a test"})
    again = load(tmp_path / "made")
    assert again.hashes() == saved.hashes() and again.step == 8
    for name, value in saved.transforms.state_dict().items():
        assert np.array_equal(again.transforms.state_dict()[name], value)
    found = [mpirun(n, "-m", "mpitrain", "evaluate", str(folder), cwd=tmp_path).out.splitlines()[-1]
             for n, folder in ((1, tmp_path / "made"), (2, tmp_path / "made"))]
    assert found[0] == found[1] and json.loads(found[0])["step"] == 8
    with pytest.raises(OutputError, match="is not empty .*: --overwrite deletes the run that is there; or set --out to another"):
        save(tmp_path / "made", saved, {"by": "a test"})


def test_evaluate_takes_a_step_or_the_best_one(run: Path, tmp_path: Path) -> None:
    logged = {line["step"]: line["loss"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
              if line.get("split") == "validation"}
    for ranks, asked in ((1, "--step 4"), (2, "--best")):
        done = mpirun(ranks, "-m", "mpitrain", "evaluate", str(run), *asked.split(), cwd=tmp_path)
        found = json.loads(done.out.splitlines()[-1])
        assert found["loss"] == logged[found["step"]], done.out + done.err
        assert found["step"] == (4 if asked == "--step 4" else min(logged, key=lambda step: logged[step]))
    for asked, said in (("--step 5", "there is no checkpoint of step 5; those of this run are of 4, 8, 12"),
                        ("--step four", "expected the number of a step, found 'four'"),
                        ("--step 4 --best", "not allowed with argument")):
        done = mpirun(1, "-m", "mpitrain", "evaluate", str(run), *asked.split(), cwd=tmp_path)
        assert done.rc not in (0, None) and said in done.err and len(done.err.strip().splitlines()) == 1, done.err
