"""`train.on_nan = "rewind"`: the state goes back to the last checkpoint where a step is not finite."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from runs import SMALL, batch, marks, ok, record, refused, steps, without_times, write
from standing import mpirun, train

NET = """
import numpy as np
from mpitrain import nn, ops
from mpitrain.autograd import Function, Tensor

def has(x, name):
    return np.isin(np.round((x * np.arange(1, 65)).sum(axis=1) * 1e3).astype(int), np.load(name))

class Huge(Function):
    @staticmethod
    def forward(ctx, x): return x.copy()
    @staticmethod
    def backward(ctx, grad): return (grad * np.float32(1e30),)

class Spoil(nn.Linear):
    \"\"\"NaN for the images of bad.npy; a gradient that is finite, and far too large, for those of huge.npy.\"\"\"
    def forward(self, x):
        if not self.training: return super().forward(x)
        x = x * Tensor(np.where(has(x.array, "bad.npy"), np.nan, 1).astype(x.dtype)[:, None])
        y = super().forward(x)
        return Huge.apply(y) if has(x.array, "huge.npy").any() else y

def net(): return nn.Sequential(("flat", nn.Flatten()), ("a", Spoil(64, 32)), ("b", nn.Linear(32, 10)))
"""
SGD = ("optimizer.name=sgd", "optimizer.schedule=constant", "optimizer.lr=0.05", "optimizer.warmup_steps=0",
       "optimizer.clip_norm=0", "checkpoint.every=5")


def prepared(folder: Path, *, bad: list[int] = [], huge: list[int] = []) -> Path:      # noqa: B006
    """A run whose data have such rows."""
    for name, rows in (("bad", bad), ("huge", huge)):
        marks(folder / f"{name}.npy", rows)
    (folder / "net.py").write_text(NET)
    return write(folder, SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"'))


@pytest.mark.promise("D1")
@pytest.mark.parametrize("keys", [
    (), pytest.param(("comm.sharding=parameters",), marks=pytest.mark.slow), ("mesh.pp=2", "optimizer.name=adamw"),
    pytest.param(("comm.node_shared=true",), marks=pytest.mark.slow),
    pytest.param(("train.reproducible=layout", "train.micro_batches=4"), marks=pytest.mark.slow)])
def test_a_state_that_broke_before_nan_showed_is_taken_back_to_the_last_checkpoint(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """Step 7 makes an update far too large, and NaN shows later. Against a run whose batches of all these steps are left out."""
    same = (*SGD, *keys, "train.steps=12")
    spoilt = {"bad": [batch(9)[30]]} if "optimizer.name=adamw" in keys else {"huge": [batch(7)[30]]}
    found = ok(train(2, prepared(tmp_path, **spoilt), "run.out=a", "train.on_nan=rewind", *same))
    about = record(tmp_path / "a")
    rewind, = about["rewinds"]
    last = rewind["step"]
    assert (last, rewind["to"], about["skipped"]) == (9, 5, 4)
    line, = [line for line in found.out.splitlines() if "left out" in line]
    assert line.startswith(f"step {last}  left out: ") and "goes on from the checkpoint of step 5" in line
    assert json.loads((tmp_path / f"a/errors/step-{last}.json").read_text())["went_back_to"] == 5
    config = prepared(tmp_path, bad=[batch(step)[30] for step in range(6, last + 1)])
    ok(train(2, config, "run.out=b", "train.on_nan=skip", *same))
    b = record(tmp_path / "b")
    assert (about["parameters_sha256"], about["buffers_sha256"]) == (b["parameters_sha256"], b["buffers_sha256"])
    assert [line["step"] for line in steps(tmp_path / "a")] == list(range(1, 13))
    assert without_times(steps(tmp_path / "a"))[last:] == without_times(steps(tmp_path / "b"))[last:]


@pytest.mark.promise("D1")
def test_a_rate_that_follows_evaluations_goes_back_with_the_state(tmp_path: Path) -> None:
    """No evaluation is better than all before it by ten times their loss, so each halves the rate."""
    config = prepared(tmp_path, bad=[batch(9)[30]])
    ok(train(1, config, "run.out=a", "train.on_nan=rewind", "train.steps=12", "train.eval_every=1", *SGD,
             "checkpoint.best=false", "optimizer.schedule=plateau", "optimizer.factor=0.5", "optimizer.patience=0",
             "optimizer.threshold=10.0"))
    assert [rewind["to"] for rewind in record(tmp_path / "a")["rewinds"]] == [5]
    assert [line["lr"] for line in steps(tmp_path / "a")] == [0.05 * 0.5 ** k for k in (*range(9), 6, 7, 8)]


@pytest.mark.promise("D1")
def test_where_the_state_is_broken_a_run_that_skips_ends_and_one_that_rewinds_trains_on(tmp_path: Path) -> None:
    config = prepared(tmp_path, huge=[batch(7)[30]])
    refused(train(2, config, "run.out=skip", "train.on_nan=skip", "train.steps=20", *SGD), 79, "E_NAN", "steps in a row")
    ok(train(2, config, "run.out=rewind", "train.on_nan=rewind", "train.steps=20", *SGD))


@pytest.mark.promise("D1", "B7")
def test_the_beginning_is_a_state_to_go_back_to_and_a_resumed_run_keeps_the_record(tmp_path: Path) -> None:
    config, same = prepared(tmp_path, bad=[batch(3)[30]]), (*SGD, "train.on_nan=rewind")
    ok(train(2, config, "run.out=a", "train.steps=8", *same))
    ok(train(2, config, "run.out=b", "train.steps=5", *same))
    assert "resumed at step 5" in ok(train(2, config, "run.out=b", "train.steps=8", "--resume", *same)).out
    a, b = record(tmp_path / "a"), record(tmp_path / "b")
    assert a["rewinds"] == b["rewinds"] == [{"step": 3, "to": 0}] and a["skipped"] == b["skipped"] == 3
    assert a["parameters_sha256"] == b["parameters_sha256"]
    assert [line.get("skipped") for line in steps(tmp_path / "b")] == [None, None, *[3] * 6]


@pytest.mark.slow
@pytest.mark.promise("D3")
def test_a_step_after_a_return_is_replayed_with_the_recorded_bits_whatever_checkpoints_are_left(tmp_path: Path) -> None:
    config = prepared(tmp_path, bad=[batch(7)[30], batch(13)[30]])
    ok(train(2, config, "run.out=a", "train.on_nan=rewind", "train.steps=15", "checkpoint.keep=9", "train.reproducible=layout",
             "train.micro_batches=4", *SGD))
    assert record(tmp_path / "a")["rewinds"] == [{"step": 7, "to": 5}, {"step": 13, "to": 10}]
    for gone, start in ((), 10), ((10,), 5), ((5,), 0):
        for step in gone:
            shutil.rmtree(tmp_path / f"a/checkpoints/step-{step:08d}")
        found = json.loads(ok(mpirun(2, "-m", "mpitrain", "replay", tmp_path / "a", "--step", "15", cwd=tmp_path)).out)
        assert found["from"] == start and set(found["recorded"]) >= {"loss", "grad_norm"}


@pytest.mark.slow
@pytest.mark.promise("D3")
def test_a_step_after_one_that_was_left_out_is_replayed_with_the_recorded_bits(tmp_path: Path) -> None:
    config = prepared(tmp_path, bad=[batch(7)[30]])
    ok(train(2, config, "run.out=a", "train.on_nan=skip", "train.steps=9", "train.reproducible=layout", "train.micro_batches=4",
             *SGD))
    found = json.loads(ok(mpirun(2, "-m", "mpitrain", "replay", tmp_path / "a", "--step", "9", cwd=tmp_path)).out)
    assert found["from"] == 5 and set(found["recorded"]) >= {"loss", "grad_norm"}


@pytest.mark.promise("D1")
def test_where_there_is_nothing_to_go_back_to_the_record_of_the_step_is_kept(tmp_path: Path) -> None:
    config = prepared(tmp_path, bad=[batch(3)[30]])
    (tmp_path / "own.py").write_text("""
import shutil
from mpitrain.train import Observer
class Removes(Observer):
    def begin(self, run): self.rank = run.rank
    def before_step(self, step):
        if step == 3 and self.rank == 0: shutil.rmtree("a/checkpoints")
""")
    refused(train(2, config, "run.out=a", "train.on_nan=rewind", "train.steps=6", "log.observers=own.py:Removes", *SGD), 66,
            "E_MISSING", "there is no checkpoint to go back to")
    cause, = json.loads((tmp_path / "a/errors/step-3.json").read_text())["causes"]
    assert batch(3)[30] in cause["rows"]


@pytest.mark.promise("D1")
def test_a_run_that_is_never_finite_ends_after_a_few_returns_on_all_ranks(tmp_path: Path) -> None:
    config = prepared(tmp_path)
    (tmp_path / "net.py").write_text(NET + """
class Log(nn.Module):
    def forward(self, x): return ops.log(x) if self.training else x
def net(): return nn.Sequential(("flat", nn.Flatten()), ("a", nn.Linear(64, 10)), ("bad", Log()))
""")
    for every in (5, 1):
        result = train(2, config, f"run.out=every{every}", "train.on_nan=rewind", *SGD, f"checkpoint.every={every}")
        refused(result, 79, "E_NAN", "step=4", "after 3 returns to saved states", "an earlier checkpoint", '"bad" (Log)')


@pytest.mark.promise("D1")
def test_a_run_without_nan_goes_back_to_nothing(tmp_path: Path) -> None:
    config, same = prepared(tmp_path), (*SGD, "train.steps=6")
    ok(train(2, config, "run.out=a", "train.on_nan=rewind", *same))
    ok(train(2, config, "run.out=b", *same))
    a, b = record(tmp_path / "a"), record(tmp_path / "b")
    assert a["parameters_sha256"] == b["parameters_sha256"] and "rewinds" not in a and "skipped" not in a
    assert not (tmp_path / "a/errors").exists()
