"""Runs of a pipeline as a user starts them: resumed on other meshes, stopped, killed, and told what is wrong in one line."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from launch import Result
from runs import SMALL, lines, record, start, without_times, write
from standing import mpirun, train

DEEP = SMALL.replace("[32]", "[32, 24, 16, 16]").replace("batch_size = 48", "batch_size = 48\nmicro_batches = 8")
LAYOUT = ("train.reproducible=layout", "optimizer.schedule=constant")
OWN = """
from mpitrain import nn, ops
from mpitrain.comm.job.start import started
class Log(nn.Module):
    def forward(self, x): return ops.log(x)
class Both(nn.Module):
    def forward(self, x): return x, x
class Shrinking(nn.Module):
    calls = 0
    def forward(self, x):
        Shrinking.calls += 1
        return x[:, :60 if Shrinking.calls > 7 else 64]
class Faulty(nn.Module):
    calls = 0
    def forward(self, x):
        Faulty.calls += 1
        if Faulty.calls == 9: self.fail()
        return x
class Raising(Faulty):
    def fail(self): raise ZeroDivisionError("on purpose")
class Dying(Faulty):
    def fail(self):
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
def net(bad, last=False):
    ends = [("wide", nn.Linear(64, 64)), ("head", nn.Linear(64, 10))]
    bad = (bad, {"log": Log, "both": Both, "shrinking": Shrinking, "raising": Raising, "dying": Dying}[bad]())
    before = [("flatten", nn.Flatten()), *([] if last else [bad])]
    return nn.Sequential(*before, *([bad] if last else []), *ends)
"""
SCHEDULES = """
from mpitrain.schedules.pipeline import Action
def alternate(stage, n_stages, n_micro):
    for micro in range(n_micro):
        yield Action("F", micro)
        yield Action("B", micro)
def backwards_first(stage, n_stages, n_micro):
    yield from (Action("F", micro) for micro in range(n_micro if stage else 1))
    yield from (Action("B", micro) for micro in range(n_micro if stage else 1))
    if stage == 0:
        yield from (Action("F", micro) for micro in range(1, n_micro))
        yield from (Action("B", micro) for micro in range(1, n_micro))
"""


def ok(result: Result) -> Result:
    assert result.rc == 0 and result.error_lines == [], result.out + result.err
    return result


def refused(result: Result, status: int, *words: str) -> Result:
    """The job ended with `status` and one line that holds all `words`."""
    assert result.rc == status, result.out + result.err
    assert len(result.error_lines) == 1, result.err
    for word in words:
        assert word in result.error_lines[0], result.error_lines[0]
    assert "Traceback" not in result.err + result.out and result.orphans == ()
    return result


def own(folder: Path, bad: str, *, last: bool = False) -> Path:
    (folder / "net.py").write_text(OWN)
    model = f'name = "net.py:net"\nbad = "{bad}"\nlast = {str(last).lower()}'
    return write(folder, SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', model))


@pytest.mark.promise("B8")
def test_a_run_goes_on_on_other_meshes_to_the_bits_of_one_rank(tmp_path: Path) -> None:
    """Two stages, then one rank, then two stages of two chunks times two copies; and each mesh evaluates what another saved."""
    config = write(tmp_path, DEEP)
    options = (*LAYOUT, "train.eval_every=5")
    ok(train(1, config, *options, "train.steps=15", "run.out=one"))
    ok(train(2, config, *options, "train.steps=5", "run.out=many", "mesh.pp=2", "mesh.schedule=zb_h1",
             "mesh.stages=time"))
    chosen = record(tmp_path / "many")["choices"]
    assert list(chosen["block_seconds"]) == ["flatten", "linear0", "linear1", "linear2", "linear3", "head"]
    assert chosen["stages"][0] == 0 < chosen["stages"][1] < chosen["stages"][2] == 6
    ok(train(1, config, *options, "train.steps=10", "run.out=many", "--resume"))
    ok(train(4, config, *options, "train.steps=15", "run.out=many", "mesh.pp=2", "mesh.schedule=interleaved", "mesh.chunks=2",
             "--resume"))
    one, many = record(tmp_path / "one"), record(tmp_path / "many")
    assert many["parameters_sha256"] == one["parameters_sha256"] and many["metrics"] == one["metrics"]
    assert without_times(lines(tmp_path / "many")) == without_times(lines(tmp_path / "one"))
    shown = ok(mpirun(3, "-m", "mpitrain", "evaluate", tmp_path / "many", "mesh.pp=3", "mesh.chunks=1")).out
    assert json.loads(shown)["loss"] == one["metrics"]["loss"]


@pytest.mark.slow
@pytest.mark.promise("B7", "E1")
def test_a_pipeline_stopped_by_a_signal_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    config = write(tmp_path, DEEP)
    options = ("train.steps=60", "mesh.pp=2")
    ok(train(2, config, "run.out=whole", *options))
    job = start(2, config, "run.out=cut", *options)
    job.wait_for("step 10/60")
    job.signal(signal.SIGUSR1)
    stopped = job.finish()
    assert stopped.rc == 85 and len(stopped.error_lines) == 1 and "E_STOPPED" in stopped.error_lines[0], stopped.err
    ok(train(2, config, "run.out=cut", *options, "--resume"))
    assert record(tmp_path / "cut")["parameters_sha256"] == record(tmp_path / "whole")["parameters_sha256"]


@pytest.mark.promise("D1")
def test_a_loss_that_is_not_finite_names_the_layer_on_whatever_stage_it_is(tmp_path: Path) -> None:
    """Two stages get NaN from the first."""
    result = refused(train(3, own(tmp_path, "log"), "mesh.pp=3"), 79, "E_NAN", "step=1", '"log" (Log)')
    assert "RuntimeWarning" not in result.err


@pytest.mark.slow
def test_a_loss_that_is_not_finite_because_of_the_last_stage_or_its_neighbour(tmp_path: Path) -> None:
    for last in (False, True):
        refused(train(2, own(tmp_path, "log", last=last), "mesh.pp=2", f"run.out={last}"), 79, "E_NAN", "step=1", '"log" (Log)')


@pytest.mark.slow
@pytest.mark.promise("A1")
def test_an_exception_on_one_stage_ends_the_job_with_one_line(tmp_path: Path) -> None:
    refused(train(2, own(tmp_path, "raising"), "mesh.pp=2", "run.out=a"), 70, "E_USER", "rank=0/2", "on purpose")


@pytest.mark.promise("A2")
def test_a_killed_stage_ends_the_job(tmp_path: Path) -> None:
    result = train(2, own(tmp_path, "dying"), "mesh.pp=2", "run.out=a", timeout=30)
    assert result.rc != 0 and result.orphans == () and len(result.error_lines) <= 1, result.err


def test_what_cannot_pass_between_stages_is_refused_naming_both(tmp_path: Path) -> None:
    here, there = "stage 0 (flatten .. both)", "stage 1 (wide .. head)"
    refused(train(2, own(tmp_path, "both"), "mesh.pp=2"), 65, "E_SHAPE", "tuple", here, there)
    here = "stage 0 (flatten .. shrinking)"
    refused(train(2, own(tmp_path, "shrinking"), "mesh.pp=2"), 65, "E_SHAPE", "(6, 60)", "(6, 64)", here, there)


def test_a_model_of_too_few_blocks_is_refused_with_the_numbers(tmp_path: Path) -> None:
    refused(train(4, write(tmp_path), "mesh.pp=4"), 78, "E_MESH", "mesh.pp=4 needs 4 blocks", "the model has 3", "set mesh.pp=3")


def test_a_schedule_of_ones_own_trains_and_one_that_deadlocks_is_refused_with_the_circle(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCHEDULES)
    config = write(tmp_path, DEEP)
    ok(train(2, config, "mesh.pp=2", "mesh.schedule=own.py:alternate", "train.steps=4", "run.out=a"))
    refused(train(2, config, "mesh.pp=2", "mesh.schedule=own.py:backwards_first", "run.out=b"), 78, "deadlock",
            "stage 0 waits in", "stage 1 waits in")
    assert not (tmp_path / "b").exists()
