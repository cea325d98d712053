"""Whole runs whose states are cut over ranks: begun, taken up again, evaluated, and what they say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from launch import mpirun
from runs import SMALL, record, train, write

pytestmark = pytest.mark.timeout(120)


def test_a_run_that_is_taken_up_again_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    """After step 5 of 10, as it was; then on one rank, whole, from the same step. `evaluate` keeps slices too."""
    config = write(tmp_path, SMALL.replace("steps = 50", "steps = 10").replace("eval_every = 25", "eval_every = 5"))
    options = ("run.out=a", 'comm.sharding="parameters"', "comm.bucket_mb=0.005", "checkpoint.every=5", "train.micro_batches=2")
    result = train(2, config, *options)
    assert result.rc == 0, result.err
    assert 'comm.sharding = "parameters": a rank keeps parameters 0.01 MiB, gradients 0.01 MiB, optimizer 0.0' in result.out
    whole = record(tmp_path / "a")
    evaluated = mpirun(2, "-m", "mpitrain", "evaluate", "a", cwd=tmp_path)
    assert json.loads(evaluated.out)["loss"] == whole["metrics"]["loss"]
    shutil.rmtree(tmp_path / "a/checkpoints/step-00000010")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    result = train(2, config, *options, "--resume")
    assert result.rc == 0, result.err
    again = record(tmp_path / "a")
    assert again["parameters_sha256"] == whole["parameters_sha256"] and again["metrics"] == whole["metrics"]
    result = train(1, config, *options, "run.out=b", "--resume")
    assert result.rc == 0, result.err
    assert record(tmp_path / "b")["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-5)


def test_a_loss_that_is_not_finite_ends_the_run_with_one_line(tmp_path: Path) -> None:
    config = write(tmp_path)
    result = train(2, config, "run.out=a", "comm.sharding=parameters", "optimizer.lr=1e38", "optimizer.clip_norm=0",
                   "optimizer.name=sgd")
    line, = result.error_lines
    assert result.rc == 79 and "E_NAN" in line and 'set comm.sharding = "gradients" to see it' in line


def test_inspect_says_what_a_rank_keeps_by_the_formula(tmp_path: Path) -> None:
    result = mpirun(1, "-m", "mpitrain", "inspect", write(tmp_path), "--ranks", "4", "comm.sharding=gradients", cwd=tmp_path)
    assert 'comm.sharding = "gradients": a rank keeps parameters 0.01 MiB, gradients 0.00 MiB, optimizer 0.00 MiB' in result.out
