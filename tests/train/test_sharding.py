"""Whole runs whose states are cut over ranks: begun, taken up again, evaluated, and what they say."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from launch import mpirun
from runs import SMALL, record, start, write
from standing import train

pytestmark = pytest.mark.timeout(120)


@pytest.mark.promise("B7")
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "gradients"])
@pytest.mark.promise("B7", "A2")
def test_a_killed_run_of_a_mesh_with_one_copy_per_node_goes_on_with_its_bits(tmp_path: Path, kind: str) -> None:
    """Two stages of two ranks; then, from the same step, on three ranks with a copy each."""
    deep = SMALL.replace("[32]", "[32, 24, 16]").replace("steps = 50", "steps = 20").replace("eval_every = 25", "eval_every = 10")
    config = write(tmp_path, deep)
    options = (f"comm.sharding={kind}", "comm.bucket_mb=0.005", "checkpoint.every=10", "checkpoint.keep=9", "log.every=10",
               "train.micro_batches=12", "optimizer.schedule=constant")
    mesh = ("mesh.pp=2", "comm.node_shared=true")
    result = train(4, config, "run.out=a", *options, *mesh)
    assert result.rc == 0 and ("one copy per node: a rank keeps" in result.out) == (kind != "none"), result.err
    assert "comm.node_shared: " not in result.out
    job = start(4, config, "run.out=b", *options, *mesh, "train.steps=100000", "checkpoint.keep=99999")
    job.wait_for("step 20/")                                  # the checkpoint of step 10 is complete by now
    os.kill(job.ranks()[-1], signal.SIGKILL)
    assert job.finish().rc != 0
    for path in sorted((tmp_path / "b/checkpoints").iterdir()):
        if path.name != "step-00000010":
            shutil.rmtree(path)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    for name, n, more in (("b", 4, mesh), ("c", 3, ())):
        result = train(n, config, f"run.out={name}", *options, *more, "--resume")
        assert result.rc == 0, result.err
    whole, again, other = (record(tmp_path / name) for name in "abc")
    assert again["parameters_sha256"] == whole["parameters_sha256"] and again["metrics"] == whole["metrics"]
    assert other["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-5)


@pytest.mark.promise("D1")
def test_a_loss_that_is_not_finite_ends_the_run_with_one_line(tmp_path: Path) -> None:
    config = write(tmp_path)
    result = train(2, config, "run.out=a", "comm.sharding=parameters", "optimizer.lr=1e38", "optimizer.clip_norm=0",
                   "optimizer.name=sgd")
    line, = result.error_lines
    assert result.rc == 79 and "E_NAN" in line and 'set comm.sharding = "gradients" to see it' in line


def test_inspect_says_what_a_rank_keeps_by_the_formula(tmp_path: Path) -> None:
    result = mpirun(1, "-m", "mpitrain", "inspect", write(tmp_path), "--ranks", "4", "comm.sharding=gradients", cwd=tmp_path)
    assert 'comm.sharding = "gradients": a rank keeps parameters 0.01 MiB, gradients 0.00 MiB, optimizer 0.00 MiB' in result.out
    result = mpirun(1, "-m", "mpitrain", "inspect", write(tmp_path, SMALL.replace("[32]", "[8000]")), "--ranks", "4",
                    "comm.sharding=gradients", "comm.node_shared=true", cwd=tmp_path)
    assert 'comm.sharding = "gradients", one copy per node: a rank keeps parameters 0.57 MiB, gradients 0.57 MiB' in result.out
