"""Whole runs under mpirun: the same result on any number of ranks, the same bits twice and after an interruption."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from runs import SMALL, lines, record, start, steps, without_times, write
from standing import train

from mpitrain.checkpoint import folders, store
from mpitrain.checkpoint.folders import remove_ours
from mpitrain.checkpoint.hashes import array_line, total_sha256

DROPOUT = """
from mpitrain import nn

def net():
    return nn.Sequential(("flatten", nn.Flatten()), ("first", nn.Linear(64, 32)), ("norm", nn.BatchNorm1d(32)),
                         ("act", nn.ReLU()), ("drop", nn.Dropout(0.3)), ("second", nn.Linear(32, 10)))
"""


def ok(result):
    assert result.rc == 0 and result.error_lines == [], result.out + result.err
    return result


@pytest.mark.promise("C8")
def test_one_to_four_ranks_have_the_same_losses_and_each_the_same_parameters_on_all_ranks(tmp_path):
    config = write(tmp_path)
    curves = {}
    for n in (1, 2, 3, 4):
        # 50 rows do not divide by 3 or 4: the mean is over the global count. A run compares its ranks' parameters at its end.
        told = ok(train(n, config, f"run.out=r{n}", "train.batch_size=50")).out
        assert "a rank keeps" not in told, "every rank keeps everything"
        curves[n] = [line["loss"] for line in steps(tmp_path / f"r{n}")]
        assert len(curves[n]) == 50
        np.testing.assert_allclose(curves[n], curves[1], rtol=1e-5)
        assert record(tmp_path / f"r{n}")["ranks"] == n
    assert curves[1][-1] < 0.5 * curves[1][0]


def test_dropout_and_batch_norm_do_not_depend_on_the_number_of_ranks(tmp_path):
    (tmp_path / "net.py").write_text(DROPOUT)
    config = write(tmp_path, SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"'))
    curves = {}
    for n in (1, 2, 3):
        ok(train(n, config, f"run.out=r{n}", "train.micro_batches=6", "train.steps=20", "train.precision=float64"))
        curves[n] = [line["loss"] for line in lines(tmp_path / f"r{n}")]
        np.testing.assert_allclose(curves[n], curves[1], rtol=1e-10)
    buffers = [store.latest(tmp_path / f"r{n}/checkpoints").read("buffers/norm.running_var") for n in (1, 3)]
    np.testing.assert_allclose(*buffers, rtol=1e-10)
    assert not np.allclose(buffers[0], 1)


@pytest.mark.promise("D4")
def test_the_same_layout_twice_gives_the_same_bits(tmp_path):
    config = write(tmp_path)
    for name in ("a", "b"):
        ok(train(2, config, f"run.out={name}"))
    assert record(tmp_path / "a")["parameters_sha256"] == record(tmp_path / "b")["parameters_sha256"]
    assert without_times(lines(tmp_path / "a")) == without_times(lines(tmp_path / "b"))


def test_the_hash_in_run_json_is_that_of_the_checkpoint(tmp_path):
    ok(train(2, write(tmp_path), "run.out=a", "train.steps=5"))
    found = store.latest(tmp_path / "a/checkpoints")
    names = [name for name in found.arrays if name.startswith("parameters/")]
    assert record(tmp_path / "a")["parameters_sha256"] == total_sha256(
        array_line(name.removeprefix("parameters/"), found.read(name)) for name in names)


@pytest.mark.promise("B7", "E1")
def test_a_run_stopped_by_sigusr1_saves_exits_85_and_resumes_to_the_same_bits(tmp_path):
    config = write(tmp_path)
    length = "train.steps=400"
    ok(train(2, config, "run.out=whole", length))
    job = start(2, config, "run.out=cut", length)
    job.wait_for("step 20/400")
    job.signal(signal.SIGUSR1)                                 # the launcher passes it on to every rank
    stopped = job.finish()
    assert stopped.rc == 85 and len(stopped.error_lines) == 1 and "E_STOPPED" in stopped.error_lines[0], stopped.err
    at = store.latest(tmp_path / "cut/checkpoints").step
    assert 20 <= at < 400 and steps(tmp_path / "cut")[-1]["step"] == at
    ok(train(2, config, "run.out=cut", length, "--resume"))
    assert record(tmp_path / "cut")["parameters_sha256"] == record(tmp_path / "whole")["parameters_sha256"]
    assert without_times(lines(tmp_path / "cut")) == without_times(lines(tmp_path / "whole"))


@pytest.mark.slow
def test_an_evaluation_that_a_stop_cut_off_is_made_up_for_by_the_resumed_run(tmp_path):
    config = write(tmp_path)
    options = ("train.steps=120", "train.eval_every=1", "checkpoint.every=7")       # whenever the signal comes, one is due
    ok(train(2, config, "run.out=whole", *options))
    job = start(2, config, "run.out=cut", *options)
    job.wait_for("step 5/120")
    job.signal(signal.SIGUSR1)
    stopped = job.finish()
    assert stopped.rc == 85, stopped.err
    found = store.latest(tmp_path / "cut/checkpoints")
    evaluated = [line["step"] for line in lines(tmp_path / "cut") if "split" in line]
    assert found.meta["evaluated"] is False and evaluated == list(range(1, found.step))
    ok(train(2, config, "run.out=cut", *options, "--resume"))
    assert without_times(lines(tmp_path / "cut")) == without_times(lines(tmp_path / "whole"))
    assert record(tmp_path / "cut")["metrics"] == record(tmp_path / "whole")["metrics"]
    best = [store.latest(tmp_path / name / "checkpoints").meta["best"] for name in ("cut", "whole")]
    assert best[0] == best[1] is not None


@pytest.mark.promise("B7", "B14", "A2")
def test_a_killed_run_resumes_from_its_last_checkpoint_to_the_same_bits(tmp_path):
    (tmp_path / "net.py").write_text(DROPOUT)
    config = write(tmp_path, SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"'))
    options = ("train.steps=300", "checkpoint.every=17", "checkpoint.best=true")
    ok(train(3, config, "run.out=whole", *options))
    job = start(3, config, "run.out=cut", *options)
    job.wait_for("step 60/300")
    for pid in job.ranks():
        try:
            import os
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    assert job.finish().rc != 0
    ok(train(3, config, "run.out=cut", *options, "--resume", "auto"))
    for key in ("parameters_sha256", "buffers_sha256"):
        assert record(tmp_path / "cut")[key] == record(tmp_path / "whole")[key]
    best = [store.latest(tmp_path / name / "checkpoints").meta["best"] for name in ("cut", "whole")]
    assert best[0] == best[1] is not None
    assert without_times(lines(tmp_path / "cut")) == without_times(lines(tmp_path / "whole"))


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_on_three(tmp_path):
    config = write(tmp_path)
    ok(train(1, config, "run.out=whole"))
    ok(train(2, config, "run.out=cut", "train.steps=50", "checkpoint.every=20", "checkpoint.keep=9"))
    for folder in sorted((tmp_path / "cut/checkpoints").iterdir()):
        if folder.name != "step-00000020":
            remove_ours(folder)
    ok(train(3, config, "run.out=cut", "--resume"))
    cut, whole = ([line["loss"] for line in steps(tmp_path / name)] for name in ("cut", "whole"))
    np.testing.assert_allclose(cut, whole, rtol=1e-5)


def test_resume_auto_starts_where_there_is_nothing(tmp_path):
    config = write(tmp_path)
    ok(train(1, config, "run.out=a", "train.steps=5", "--resume", "auto"))
    assert record(tmp_path / "a")["status"] == "done"


def test_keep_best_keeps_the_checkpoint_of_the_lowest_validation_loss(tmp_path):
    config = write(tmp_path)
    ok(train(1, config, "run.out=a", "train.eval_every=5", "checkpoint.best=true", "checkpoint.keep=1", "optimizer.lr=0.3",
             "optimizer.clip_norm=0", "optimizer.schedule=constant"))
    losses = {line["step"]: line["loss"] for line in lines(tmp_path / "a") if "split" in line}
    kept = {folders.step_of(path) for path in folders.candidates(tmp_path / "a/checkpoints")}
    assert kept == {50, min(losses, key=losses.__getitem__)}


def test_a_validation_loss_that_is_not_finite_is_never_the_best_and_does_not_end_the_run(tmp_path):
    import json

    from launch import mpirun
    (tmp_path / "net.py").write_text("""
from mpitrain import nn
class Blind(nn.Module):
    def forward(self, x): return x if self.training else x * float("nan")
def make(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Blind())
""")
    config = write(tmp_path, SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:make"'))
    ok(train(1, config, "run.out=a", "train.steps=2", "checkpoint.best=true"))
    found = ok(mpirun(1, "-m", "mpitrain", "evaluate", tmp_path / "a", cwd=tmp_path))
    assert record(tmp_path / "a")["metrics"]["loss"] is None
    assert json.loads(found.out.splitlines()[-1])["loss"] is None


@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_evaluate_repeats_the_metrics_of_the_run_to_the_bit(tmp_path, n):
    import json

    from launch import mpirun
    ok(train(2, write(tmp_path), "run.out=a"))
    found = ok(mpirun(n, "-m", "mpitrain", "evaluate", tmp_path / "a", cwd=tmp_path))
    metrics = json.loads(found.out.splitlines()[-1])
    assert metrics["step"] == 50 and metrics["accuracy"] == record(tmp_path / "a")["metrics"]["accuracy"]
    assert metrics["loss"] == record(tmp_path / "a")["metrics"]["loss"]


def test_recomputing_blocks_runs_each_twice_and_changes_no_bit(tmp_path):
    (tmp_path / "net.py").write_text(DROPOUT + """

calls = 0

class Counted(nn.Linear):
    def forward(self, x):
        global calls
        calls += 1
        open(f"calls-{calls}", "w").close()
        return super().forward(x)

def counted():
    model = net()
    model.blocks["first"] = Counted(64, 32)
    return model
""")
    config = write(tmp_path, SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:counted"'))
    found = []
    for name in ("false", "true"):
        ok(train(1, config, f"run.out=r-{name}", f"train.recompute={name}", "train.steps=4", "data.validation=0"))
        found.append(len(list(tmp_path.glob("calls-*"))))
        for path in tmp_path.glob("calls-*"):
            path.unlink()
    assert found[1] - 3 == 2 * (found[0] - 3) >= 8             # three trial samples, then what predicts the memory, and steps
    assert record(tmp_path / "r-false")["parameters_sha256"] == record(tmp_path / "r-true")["parameters_sha256"]


def test_the_peak_of_memory_is_told_at_the_end_and_with_each_line_of_metrics(tmp_path):
    told = ok(train(2, write(tmp_path), "run.out=a", "train.steps=5", "train.cached_mb=0.5")).out
    peak = record(tmp_path / "a")["peak_mb"]
    assert 20 < peak["resident"] < 2000 and 0 < peak.get("arrays", 0.1) < peak["resident"]
    assert f"most memory of a rank: resident {peak['resident']:,.0f} MiB" in told
    assert "predicted / measured" in told and ("/ -" in told) == ("arrays" not in peak), "what the pool counts is in the table"
    rising = [line["peak_rss_mb"] for line in steps(tmp_path / "a")]
    assert len(rising) == 5 and rising == sorted(rising) and 20 < rising[0] <= rising[-1] <= peak["resident"] + 0.1
