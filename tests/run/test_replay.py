"""`mpitrain replay`: the bits of a step, again; and whose fault it is where they are others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import Result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
from runs import SMALL, steps, write  # noqa: E402
from standing import mpirun, train  # noqa: E402

RUN = ("run.out=a", "train.steps=10", "checkpoint.every=4", "checkpoint.keep=9", "checkpoint.best=false", "log.every=1")
LAYOUT = ("train.reproducible=layout", "train.micro_batches=4")
NET = """
import os
import numpy as np
from pathlib import Path
from mpitrain import nn
from mpitrain.autograd import Function
FACTOR = 1.0

class Flip(Function):
    \"\"\"One bit of the gradient is flipped where the file `faulty` has this rank and the number of this call.\"\"\"
    @staticmethod
    def forward(ctx, x): return x * np.float32(FACTOR)
    @staticmethod
    def backward(ctx, grad):
        place = Path(__file__).with_name("faulty")
        rank, call = place.read_text().split() if place.exists() else ("-1", "0")
        Net.calls += 1
        grad = grad.copy()
        if rank == os.environ.get("OMPI_COMM_WORLD_RANK") and call in ("all", str(Net.calls)):
            grad.reshape(-1).view(np.uint32)[np.abs(grad).argmax()] ^= 1 << 20
        return (grad,)

class Net(nn.Linear):
    calls = 0
    def forward(self, x): return Flip.apply(super().forward(x))

def net():
    return nn.Sequential(("flat", nn.Flatten()), ("a", Net(64, 32)), ("act", nn.ReLU()), ("drop", nn.Dropout(0.1)),
                         ("b", nn.Linear(32, 10)))
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return write(tmp_path, SMALL.replace('name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10', 'name = "net.py:net"'))


def ran(n: int, config: Path, *keys: str) -> Path:
    result = train(n, config, *RUN, *keys)
    assert result.rc == 0, result.err
    return config.parent / "a"


def replay(n: int, run: Path, *words: str) -> tuple[Result, dict[str, Any]]:
    result = mpirun(n, "-m", "mpitrain", "replay", run, *words, cwd=run.parent)
    shown = [line for line in result.out.splitlines() if line.startswith("{")]
    return result, json.loads(shown[-1]) if shown else {}


def differs(result: Result, *words: str) -> None:
    assert result.rc == 76 and len(result.error_lines) == 1, result.out + result.err
    for word in ("E_DESYNC", *words):
        assert word in result.error_lines[0], result.error_lines[0]


@pytest.mark.promise("D3")
def test_a_step_has_the_recorded_bits_on_any_ranks_from_any_checkpoint(config: Path) -> None:
    run = ran(3, config, *LAYOUT)
    lines = {line["step"]: line for line in steps(run)}
    for ranks, step, start in ((1, 3, 0), (2, 7, 4), (1, 8, 4), (2, 9, 8)):
        result, found = replay(ranks, run, "--step", str(step))
        assert result.rc == 0 and result.error_lines == [], result.err
        assert (found["from"], found["ranks"], found["micro_batch"]) == (start, ranks, None)
        assert (found["loss"], found["grad_norm"]) == (lines[step]["loss"], lines[step]["grad_norm"])
        assert float.fromhex(found["loss_hex"]) == found["loss"] and set(found["gradients"]) == {
            "a.weight", "a.bias", "b.weight", "b.bias"}
        assert found["recorded"] == {"loss": found["loss"], "grad_norm": found["grad_norm"]}


@pytest.mark.promise("D3")
def test_without_one_order_of_addition_the_loss_after_a_checkpoint_is_compared_and_no_other(config: Path) -> None:
    run = ran(2, config)
    result, found = replay(1, run, "--step", "5")
    assert result.rc == 0 and found["recorded"] == {"loss": found["loss"]}, result.err
    result, found = replay(1, run, "--step", "7")
    assert result.rc == 0 and found["recorded"] == {}, result.err


@pytest.mark.slow
@pytest.mark.promise("D3")
def test_a_micro_batch_alone_has_the_same_bits_on_all_ranks_and_a_faulty_rank_is_named(config: Path) -> None:
    run = ran(2, config, *LAYOUT)
    result, found = replay(3, run, "--step", "5", "--micro-batch", "2")
    assert result.rc == 0 and found["micro_batch"] == 2 and found["grad_norm"] is None, result.err
    (config.parent / "faulty").write_text("1 all")
    differs(replay(3, run, "--step", "5", "--micro-batch", "2")[0], "rank 1 (", "computes other bits than rank 0 (",
            'first in the gradient of "a.', "that node, not the code")
    differs(replay(2, run, "--step", "5")[0], "rank 1 (", "the others have the recorded bits")
    result, _ = replay(1, run, "--step", "6", "--micro-batch", "4")
    assert result.rc == 64 and "micro-batches 0 to 3, found --micro-batch 4" in result.error_lines[0]


@pytest.mark.promise("D3")
def test_a_gradient_that_one_rank_got_wrong_in_the_run_is_found_in_its_step(config: Path) -> None:
    """Rank 1 of 2 has two of the four micro-batches: its eleventh is the first one of step 6."""
    (config.parent / "faulty").write_text("1 11")
    run = ran(2, config, *LAYOUT)
    (config.parent / "faulty").unlink()
    assert replay(1, run, "--step", "5")[0].rc == 0
    differs(replay(2, run, "--step", "6")[0], "2 ranks now agree on other bits than recorded: grad_norm", "a fault that is gone")
    differs(replay(1, run, "--step", "8")[0], "on one rank; run it on two hosts", "parameters of the checkpoint after the step")


@pytest.mark.promise("D3")
def test_code_that_has_changed_is_told_from_a_node(config: Path) -> None:
    run = ran(2, config, *LAYOUT)
    net = config.parent / "net.py"
    net.write_text(net.read_text().replace("FACTOR = 1.0", "FACTOR = 1.0001"))
    differs(replay(2, run, "--step", "5")[0], "2 ranks now agree on other bits than recorded: loss", "The code or its numerics")


def test_what_is_no_run_or_no_step_is_one_line(config: Path, tmp_path: Path) -> None:
    result, _ = replay(1, tmp_path, "--step", "5")
    assert result.rc == 66 and len(result.error_lines) == 1 and "expected a run folder" in result.error_lines[0]
    run = ran(1, config)
    result, _ = replay(2, run, "--step", "0")
    assert result.rc == 64 and len(result.error_lines) == 1 and "steps count from 1" in result.error_lines[0]
    steps = json.loads((run / "run.json").read_text())["steps"]
    result, _ = replay(2, run, "--step", str(steps + 1))
    assert result.rc == 64 and len(result.error_lines) == 1 and f"the run has {steps} steps, found" in result.error_lines[0]
