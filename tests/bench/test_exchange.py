"""`mpitrain bench exchange`: what it writes, and that a wrong update on any rank is found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from standing import mpirun

from mpitrain import optim
from mpitrain.bench.exchange import BETAS, DECAY, EPS, LR, Serial, Weights
from mpitrain.bench.inputs import BLOCK, Inputs
from mpitrain.errors import MpitrainError

FIELDS = ["bench", "algorithm", "bytes", "dtype", "ranks", "seconds", "mpi_seconds", "ratio"]


def updated(count: int, steps: int, ranks: list[int], n: int = 2, missed: int | None = None) -> tuple[np.ndarray, Serial]:
    """Our AdamW on the sums over `ranks`, its gradient of step `missed` from the step before; and the serial run over n."""
    inputs = Inputs(count, "float32", n)
    serial = Serial(inputs)
    storage = Weights(count).initialize(seed=0)
    optimizer = optim.AdamW(storage, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    part = np.empty(count, np.float32)
    for step in range(steps):
        flat = storage.new_flat()
        for rank in ranks:
            inputs.fill(part, rank, step - (step == missed))
            flat[:count] += part
        optimizer.update(flat, lr=LR, step=step + 1)
        serial.step()
    return storage.values, serial


@pytest.mark.parametrize("count", [1, 1001, 2 * BLOCK + 7])
def test_our_own_update_agrees_with_the_serial_run(count: int) -> None:
    values, serial = updated(count, 30, [0, 1])
    serial.check(values, "x")
    assert np.abs(serial.w).max() > 0.1


@pytest.mark.parametrize("wrong", [{"ranks": [0]}, {"ranks": [1]}, {"ranks": [0, 1, 1]}, {"ranks": [0, 1], "missed": 4}])
def test_a_lost_rank_one_counted_twice_and_a_stale_gradient_are_found(wrong: dict) -> None:
    values, serial = updated(1000, 5, **wrong)
    with pytest.raises(MpitrainError, match="x gave a wrong parameter: element 0 of 1000 is .* after step 5"):
        serial.check(values, "x")


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_one_parameter_that_was_left_behind_is_found(value: float) -> None:
    values, serial = updated(2 * BLOCK, 2, [0, 1])
    values[BLOCK + 1] = value
    with pytest.raises(MpitrainError, match=f"element {BLOCK + 1} of"):
        serial.check(values, "x")


@pytest.mark.parametrize("n", [2, 3])
def test_the_command_writes_one_object_a_policy(n: int, tmp_path: Path) -> None:
    result = mpirun(n, "-m", "mpitrain", "bench", "exchange", "--parameters", "40001", "--bucket-bytes", "64K", "--pairs", "3",
                    "--json", "e.json", cwd=tmp_path)
    assert result.rc == 0 and result.error_lines == [], result.err
    records = [json.loads(line) for line in (tmp_path / "e.json").read_text().splitlines()]
    assert [record["algorithm"] for record in records] == ["messages", "replicated", "node_shared"]
    for record in records:
        assert list(record)[:8] == FIELDS and record["parameters"] == 40001 and record["bytes"] == 160004
        assert (record["bench"], record["ranks"]) == ("exchange", n)
        slowest, fastest = (record[f"mpi_seconds_{a}"] / record[f"seconds_{b}"] for a, b in (("low", "high"), ("high", "low")))
        assert slowest <= record["ratio"] <= fastest


def test_a_policy_that_forgets_a_rank_ends_the_job_with_one_line(tmp_path: Path) -> None:
    program = tmp_path / "forgetful.py"
    program.write_text("""
import sys
from mpitrain.bench import exchange
from mpitrain.cli import main
from mpitrain.comm.job.guard import Process

class Forgetful(exchange.WithNative):
    def step(self):
        self._optimizer.update(self._gradients, lr=exchange.LR, step=self._optimizer.steps + 1)

exchange.POLICIES.register("a_forgetful_one")(Forgetful)
Process().run(lambda: main(["bench", "exchange", "--parameters", "1000", "--pairs", "1"]))
""")
    result = mpirun(2, program, cwd=tmp_path)
    assert result.rc == 70 and len(result.error_lines) == 1, result.err
    assert "exchange a_forgetful_one gave a wrong parameter: element 0 of 1000" in result.error_lines[0]


@pytest.mark.parametrize(("free", "parameters", "left_out"), [
    (0, 1000, ["replicated", "node_shared"]),                 # no room for anything
    (6 << 20, 1_000_000, ["replicated", "node_shared"]),      # for flags, not for the gradients of two ranks
    (10 << 20, 1_000_000, ["node_shared"])])                  # for gradients, not for parameters and state besides
def test_what_there_is_no_room_for_is_left_out_with_a_line(free: int, parameters: int, left_out: list[str],
                                                           tmp_path: Path) -> None:
    program = tmp_path / "small.py"
    program.write_text(f"""
from mpitrain.cli import main
from mpitrain.comm.shared import window
from mpitrain.comm.job.guard import Process
from mpitrain.comm.shared.node import Node

taken, make = [], window.Window.make.__func__
def counted(cls, comm, nbytes, parts=1, **options):
    found = make(cls, comm, nbytes, parts, **options)
    taken.append(nbytes * parts if found[0] else 0)
    return found
def close(self):
    taken.clear()
    was(self)
window.Window.make = classmethod(counted)
was, Node.close = Node.close, close
Node.__init__.__kwdefaults__["free"] = lambda: {free} - sum(taken)
Process().run(lambda: main(["bench", "exchange", "--parameters", "{parameters}", "--pairs", "1"]))
""")
    result = mpirun(2, program, cwd=tmp_path)
    assert result.rc == 0 and result.error_lines == [], result.err
    lines = {line.split()[0]: line for line in result.out.splitlines()[2:]}
    assert list(lines) == ["messages", "replicated", "node_shared"]
    for name, line in lines.items():
        assert bool(re.search(r"left out: .* MiB free where \d+ MiB are needed", line)) == (name in left_out), line


def test_messages_are_those_of_a_run_that_cannot_share_memory(tmp_path: Path) -> None:
    """The channel chooses an algorithm for each size; nothing is shared."""
    program = tmp_path / "program.py"
    program.write_text("""
from mpitrain.bench import exchange
from mpitrain.comm.messages.channel import Channel
from mpitrain.comm.job.start import start
policy = exchange.POLICIES["messages"](start(), 1000, 4096)
assert type(policy._policy.channel) is Channel and policy._policy.channel.algorithm == "auto"
policy.close()
""")
    assert mpirun(2, program, cwd=tmp_path).rc == 0


@pytest.mark.parametrize(("arguments", "message"), [
    (["--parameters", "0"], "--parameters must be at least 1, found 0"),
    (["--bucket-bytes", "none"], '--bucket-bytes takes bytes above 0 such as 8, 64K or 16MiB, found "none"')])
def test_a_mistake_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = mpirun(2, "-m", "mpitrain", "bench", "exchange", *arguments, cwd=tmp_path)
    assert result.rc == 64 and len(result.error_lines) == 1 and message in result.error_lines[0], result.err
