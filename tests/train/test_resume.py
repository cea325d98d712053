"""A run that goes on asks whether it is still the same experiment: what it refuses, what it tells, what it takes no notice of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import resume_table
from launch import Result
from resume_table import CASES, Case
from runs import record, write
from standing import mpirun, train

PROGRAM = Path(resume_table.__file__)
RANKS = (1, 2)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[dict[str, Any]]]]:
    """The folder, and what came of each case, on so many ranks: one job each runs them all."""
    found = {}
    for n in RANKS:
        folder = tmp_path_factory.mktemp(f"resume-{n}")
        resume_table.write(folder)
        result = mpirun(n, PROGRAM, folder, cwd=folder, timeout=150)
        assert result.rc == 0, result.out + result.err
        found[n] = folder, json.loads(result.out.splitlines()[-1])
    return found


@pytest.mark.promise("B5", "B9", "B10", "C2", "C4")
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_changed_since_the_checkpoint_is_refused_or_told(results: Any, case: Case, n: int) -> None:
    folder, all_found = results[n]
    found = all_found[CASES.index(case)]
    assert found["code"] == case.code, found
    if case.code:
        assert all(text in found["message"] for text in case.said), found
        assert found["exit"] == {"E_CONFIG": 78, "E_DESYNC": 76}.get(case.code, 65)
        assert record(folder / found["run"]) == record(folder / "base"), "a run that is refused changes nothing"
        return
    told = [text for text in found["told"] if "resumed at step" not in text and "most memory" not in text]
    for text in case.said:
        assert any(text in line for line in told), found
    if not case.said:
        assert not any(" was " in line or "checkpoint" in line for line in told), found
    changes = record(folder / found["run"])["changes"]
    assert len(changes) == (0 if case.prepare == "no_record" else len(case.said)), changes
    assert all(change["step"] == 8 and set(change) == {"step", "key", "was", "is"} for change in changes)


@pytest.mark.parametrize("n", RANKS)
def test_a_run_that_changed_nothing_ends_with_the_bits_of_one_that_never_stopped(results: Any, n: int) -> None:
    folder, found = results[n]
    whole = record(folder / "whole")["parameters_sha256"]
    same = {case.name: one["sha256"] == whole for case, one in zip(CASES, found, strict=True) if not case.code}
    for name in ("unchanged", "unchanged, strict", "longer, other intervals", "moved file, the same bytes", "damaged",
                 "a renamed folder"):
        assert same[name], name
    assert not same["rate"] and not same["seed, allowed"] and not same["other data, allowed"]


def ok(result: Result) -> Result:
    assert result.rc == 0 and result.error_lines == [], result.out + result.err
    return result


def refused(result: Result, rc: int, *texts: str) -> None:
    assert result.rc == rc and len(result.error_lines) == 1, result.out + result.err
    assert all(text in result.error_lines[0] for text in texts), result.error_lines


@pytest.mark.slow
@pytest.mark.promise("B9", "C4")
def test_a_file_that_changed_between_two_jobs_and_flags_of_the_command_line(tmp_path: Path) -> None:
    resume_table.write(tmp_path)
    config = tmp_path / "run.toml"
    ok(train(2, config, "run.out=a"))
    shutil.copy(tmp_path / "other.h5", tmp_path / "data.h5")
    longer = ("run.out=a", "train.steps=12", "--resume")
    refused(train(2, config, *longer), 65, "E_DATA_CHANGED", "the training data are not the checkpoint's", "--change data")
    refused(train(1, config, *longer, "--change", "dat"), 64, "E_USAGE", 'did you mean "data"')
    refused(train(1, config, *longer[:2], "--change", "data"), 64, "E_USAGE", "--resume")
    refused(train(2, config, *longer, "--change", "data", "--strict", "optimizer.lr=0.5"), 78, "E_CONFIG", "optimizer.lr was 0.1")
    told = ok(train(2, config, *longer, "--change", "data", "optimizer.lr=0.5")).out
    assert "optimizer.lr was 0.1 until step 8, is 0.5" in told and "the training data are not the checkpoint's" in told
    again = ok(train(1, config, "run.out=a", "train.steps=13", "optimizer.lr=0.1", "--resume")).out
    assert "optimizer.lr was 0.5 until step 12, is 0.1" in again and "the training data" not in again
    assert [(change["step"], change["key"]) for change in record(tmp_path / "a")["changes"]] == [
        (8, "optimizer.lr"), (8, "data"), (12, "optimizer.lr")]


@pytest.mark.slow
@pytest.mark.promise("B5", "B10")
def test_evaluate_tells_of_other_rows_and_refuses_another_runs_checkpoint(tmp_path: Path) -> None:
    resume_table.write(tmp_path)
    config = tmp_path / "run.toml"
    for name, seed in (("a", 0), ("b", 1)):
        ok(train(1, config, f"run.out={name}", f"run.seed={seed}", f"train.steps={8 + seed}"))

    def evaluate(*overrides: str) -> Result:
        return mpirun(1, "-m", "mpitrain", "evaluate", tmp_path / "a", *overrides, cwd=tmp_path)
    assert "warning" not in ok(evaluate()).err, "the control"
    assert "run.seed was 0 until step 8, is 7" in ok(evaluate("run.seed=7", "optimizer.lr=3")).err
    assert "the training data are not the checkpoint's" in ok(evaluate("data.path=other.h5")).err
    shutil.copytree(tmp_path / "b/checkpoints/step-00000009", tmp_path / "a/checkpoints/step-00000009")
    refused(evaluate(), 65, "E_CHECKPOINT", "of another run", "step-00000009")
    refused(train(2, config, "run.out=a", "--resume", "train.steps=12"), 65, "E_CHECKPOINT", "of another run", "step-00000009")


@pytest.mark.promise("B9")
def test_a_checkpoint_of_an_older_version_is_not_compared_and_says_so(tmp_path: Path) -> None:
    """Its run.json has no id either, as theirs had not."""
    resume_table.write(tmp_path)
    config = tmp_path / "run.toml"
    ok(train(1, config, "run.out=a"))
    resume_table.no_record(tmp_path / "a")
    about = record(tmp_path / "a")
    del about["id"], about["changes"]
    (tmp_path / "a/run.json").write_text(json.dumps(about))
    assert "not compared" in ok(train(1, config, "run.out=a", "train.steps=12", "run.seed=3", "--resume")).out
    assert record(tmp_path / "a")["id"]
    refused(train(1, config, "run.out=a", "train.steps=16", "--resume"), 78, "run.seed was 3 until step 12, is 0")


OWN = """
from mpitrain import optim

class Sgd(optim.Optimizer):
    def change(self, run, gradients, lr, step, scale):
        values, = self.parts(run)
        values -= lr * scale * gradients
"""


@pytest.mark.promise("D9")
def test_layout_says_which_code_of_the_users_it_cannot_answer_for(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = write(tmp_path)
    own = ("optimizer.name=own.py:Sgd", "train.steps=2", "train.micro_batches=4")
    line = 'cannot know whether code of your own gives the same bits on any ranks: optimizer.name = "own.py:Sgd"'
    assert line in ok(train(2, config, *own, "run.out=a", "train.reproducible=layout")).out
    assert "of your own" not in ok(train(2, config, *own, "run.out=b")).out, "the control: nothing is promised"
    assert "of your own" not in ok(train(2, config, "run.out=c", "train.steps=2", "train.micro_batches=4",
                                         "train.reproducible=layout")).out
