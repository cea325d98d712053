"""Runs with compressed gradients: what they say, what they refuse, and that nothing of them is in other runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, mpirun
from runs import SMALL, lines, ok, record, refused, start, steps, write
from standing import train

from mpitrain.config import load_config
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.parallel.gradients.timeline import StepTimes
from mpitrain.plan.inspect import inspect
from mpitrain.train.observers.compression import waited

FORCED = ("comm.compress_force=true", "log.every=5", "train.steps=30")
KEYS = {"wire_bytes", "wire_bytes_nodes", "compress_ratio", "compress_s", "error_norm", "break_even_mbit"}
MINE = """
import os
from pathlib import Path

import numpy as np

from mpitrain.parallel.compress.blocks import Int8
from mpitrain.parallel.compress.compressor import Gathered, whole

class Dies(Int8):
    def encode(self, step, worker, *rest):
        if step == 13 and worker == 1 and Path("deadly").exists():
            Path("deadly").unlink()
            os.kill(os.getpid(), 9)
        super().encode(step, worker, *rest)

class Forgets(Gathered):
    block = 32
    def nbytes(self):
        return whole(4 * self.length)
    def encode(self, step, values, state, message):
        message[...] = 0
        message[:4 * self.length].view(np.float32)[:-1] = values[:-1]
    def decode(self, step, messages, values):
        values[...] = sum(m[:4 * self.length].view(np.float32) for m in messages)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return write(tmp_path, SMALL)


@pytest.mark.parametrize(("words", "says"), [
    (["train.reproducible=layout", "train.micro_batches=4"], "gives each rank, or node, a residual of its own"),
    (["comm.node_shared=true"], "comm.node_shared = true updates each rank's slice as it is summed"),
    (["comm.compress=topk:0.01", "comm.sharding=optimizer"], 'found comm.sharding = "optimizer"; set comm.sharding = "none"'),
    (["comm.bucket_mb=auto"], 'comm.bucket_mb = "auto" measures the exchange of dense buckets'),
    (["optimizer.name=lbfgs", "optimizer.clip_norm=0"], "LBFGS compares gradients of one step"),
    (["train.on_nan=skip"], 'set train.on_nan = "stop" or "rewind"'),
    (["train.on_lost=go_on"], "keeps residuals that only their own rank has"),
    (["train.precision=float64"], 'packs gradients of float32, found train.precision = "float64"'),
    (["comm.wire_dtype=bfloat16"], 'says what travels, found comm.wire_dtype = "bfloat16"'),
    (["comm.algorithm=ring"], "would round sums again at every hop"),
    (["comm.algorithm=mpi"], "knows numbers, not what is in a message"),
    (["comm.compress=topk:0.01", "comm.algorithm=tree"], "has no all-gather"),
    (["comm.compress_after=50"], "comm.compress_after = 50 is beyond the run, which has 50 steps"),
    (["comm.compress_warmup=5"], 'sends a larger share at first, and comm.compress = "int8" has no share that can change'),
    (["comm.compress=topk:0.1", "comm.compress_warmup=40", "comm.compress_after=10"],
     "comm.compress_warmup = 40 after 10 dense steps is beyond the run, which has 50 steps: topk:0.1 would never be reached"),
    (["comm.compress=int7"], 'unknown compressor "int7"'), (["comm.compress=topk:0"], "above 0 and at most 1"),
    (["comm.compress=topk:nan"], "above 0 and at most 1"), (["comm.compress=powersgd:0"], "expected a rank"),
    (["comm.compress=mine.py:Dies2"], 'mine.py has no "Dies2"'), (["comm.compress=mine.py:Path"], "expected a subclass of"),
    (["comm.compress=mine.py:Forgets"], 'compressor "mine.py:Forgets" with n=4')])
def test_what_does_not_go_with_it_is_refused_by_inspect(config: Path, words: list[str], says: str) -> None:
    given = [*(["comm.compress=int8"] if not any(word.startswith("comm.compress=") for word in words) else []), *words]
    with pytest.raises(ConfigError) as caught:
        list(inspect(config, given, ranks=4))
    assert says in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize("words", [("comm.compress=int8", "comm.algorithm=ring"), ("comm.compress=mine.py:Forgets",)])
def test_train_refuses_what_inspect_refuses_with_its_line(config: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(MpitrainError) as caught:
        list(inspect(config, list(words), ranks=2))
    refused(train(2, config, *words, "comm.compress_force=true"), 78, caught.value.message)
    assert not (config.parent / "runs").exists()


def test_a_run_says_what_travels_and_where_dense_would_be_faster(config: Path) -> None:
    done = ok(train(2, config, "comm.compress=int8", *FORCED))
    assert "gradients travel as int8 between 2 ranks: " in done.out
    assert "dense would be faster on this link: " in done.out and " ms of waiting in a step" in done.out
    run = config.parent / "runs/run"
    found = steps(run)
    assert all(set(line) >= KEYS for line in found) and not any(KEYS & set(line) for line in lines(run) if "split" in line)
    assert {line["wire_bytes"] for line in found} == {found[0]["wire_bytes"]} and found[0]["wire_bytes_nodes"] == 0
    assert all(line["compress_ratio"] > 2 and 0 < line["error_norm"] < 1 and line["compress_s"] > 0 for line in found)
    exchange = record(run)["choices"]["exchange"]
    assert exchange["way"].endswith(", compressed between 2 workers") and exchange["wire"] == "int8"
    said = "\n".join(inspect(config, ["comm.compress=int8", "comm.compress_force=true"], ranks=2))
    assert f"{int(found[0]['wire_bytes']):,} bytes of a rank and step instead of" in said
    predicted, measured = (record(run)["memory"][name][0]["residuals"] for name in ("predicted", "measured"))
    assert abs(measured / predicted - 1) < 0.03


def test_the_first_steps_are_dense_where_that_is_asked_for(config: Path) -> None:
    said = "comm.compress_after = 10 has no effect: comm.compress is empty"
    assert said in ok(train(2, config, "run.out=dense", "comm.compress_after=10", *FORCED[1:])).out
    for key in ("after", "warmup"):
        assert said.replace("after", key) in "\n".join(inspect(config, [f"comm.compress_{key}=10"], ranks=2))
    words = ("comm.compress=topk:0.05", "comm.compress_after=10", "comm.compress_warmup=10", *FORCED)
    done = ok(train(2, config, "run.out=later", *words))
    assert ", 4 and 2 times the share in the first 10; its state takes" in done.out
    dense, later = (steps(config.parent / name) for name in ("dense", "later"))
    assert [line["loss"] for line in dense[:2]] == [line["loss"] for line in later[:2]]
    assert [line["compress_ratio"] > 1.5 for line in later] == [False, False, True, True, True, True]
    assert later[1]["error_norm"] == 0 and dense[-1]["loss"] != later[-1]["loss"]
    sent = [int(line["wire_bytes"]) for line in later]
    assert sent[2] > 1.2 * sent[3] > 1.4 * sent[4] and sent[4] == sent[5]
    said = "\n".join(inspect(config, list(words), ranks=2))
    assert all(f"{one:,} bytes {what}" in said for one, what in (
        (sent[2], "in part 1 of 2 of the 10 steps of its warm-up"), (sent[3], "in part 2 of 2"), (sent[4], "of a rank and step")))


def test_the_ratio_is_to_dense_sums_of_what_is_trained_in_these_steps(config: Path) -> None:
    ok(train(2, config, "comm.compress=int8", *FORCED[:2], "train.steps=15", "comm.bucket_mb=0.001",
             'optimizer.groups=[{params="linear0.*", freeze_until=10}]'))
    found = steps(config.parent / "runs/run")
    assert found[0]["wire_bytes"] < 0.3 * found[2]["wire_bytes"]
    assert all(2 < line["compress_ratio"] < 4 for line in found), [line["compress_ratio"] for line in found]


def test_on_one_node_it_has_no_effect_which_is_said_and_other_runs_know_nothing_of_it(config: Path) -> None:
    said = ok(train(2, config, "run.out=asked", "comm.compress=int8", *FORCED[1:])).out
    assert 'comm.compress = "int8" has no effect: all 2 ranks are on one node' in said
    ok(train(2, config, "run.out=plain", *FORCED[1:]))
    asked, plain = (record(config.parent / name) for name in ("asked", "plain"))
    assert asked["parameters_sha256"] == plain["parameters_sha256"]
    assert not any(KEYS & set(line) for line in lines(config.parent / "asked"))
    assert 'has no effect: no other rank has the same parameters' in "\n".join(inspect(config, ["comm.compress=int8"]))


def test_a_run_without_it_imports_none_of_it(config: Path) -> None:
    (config.parent / "alone.py").write_text(
        "import sys\nfrom mpitrain.__main__ import main\nsys.argv[1:] = ['train', 'run.toml', 'train.steps=2']\n"
        "try:\n    main()\nfinally:\n"
        "    print('found', [n for n in sys.modules if 'compress' in n and n.startswith('mpitrain') or 'residuals' in n])\n")
    assert "found []" in ok(mpirun(2, "alone.py", cwd=config.parent)).out


def test_inspect_needs_no_mpi_for_it(config: Path) -> None:
    program = ("import sys; from pathlib import Path; from mpitrain.plan.inspect import inspect; "
               "list(inspect(Path('run.toml'), ['comm.compress=int8'], ranks=2)); assert 'mpi4py' not in sys.modules")
    subprocess.run([sys.executable, "-c", program], cwd=config.parent, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def test_the_compressor_of_the_documentation_trains(config: Path) -> None:
    block, = re.findall(r"```python\n(import numpy.*?class Half.*?)```", (ROOT / "docs/compression.md").read_text(), re.DOTALL)
    (config.parent / "half.py").write_text(block)
    done = ok(train(2, config, "comm.compress=half.py:Half", *FORCED))
    assert "gradients travel as half.py:Half between 2 ranks: " in done.out
    assert steps(config.parent / "runs/run")[-1]["loss"] < 1.8


@pytest.mark.promise("A1")
def test_a_rank_that_is_killed_between_encoding_and_landing_loses_nothing(config: Path) -> None:
    words = ("comm.compress=mine.py:Dies", "comm.compress_force=true", "checkpoint.every=5", "train.steps=20",
             "checkpoint.asynchronous=false")
    ok(train(2, config, "run.out=whole", *words))
    (config.parent / "deadly").touch()
    ended = start(2, config, "run.out=cut", *words).finish(60)
    assert ended.rc != 0 and len(ended.error_lines) <= 1 and not (config.parent / "deadly").exists()
    done = ok(train(2, config, "run.out=cut", "--resume", *words))
    assert "resumed at step 10" in done.out
    whole, cut = (record(config.parent / name)["parameters_sha256"] for name in ("whole", "cut"))
    assert whole == cut


def test_a_dense_checkpoint_goes_on_with_zeros_and_says_so(config: Path) -> None:
    ok(train(2, config, "train.steps=6", "checkpoint.every=6"))
    said = ok(train(2, config, "train.steps=12", "--resume", "comm.compress=int8", "comm.compress_force=true")).out
    assert "the checkpoint has no residuals of compressed gradients, or not all: they begin with zeros" in said
    assert "from here on the bits are not those of the run that was interrupted" in said
    manifest = json.loads(next((config.parent / "runs/run/checkpoints").glob("step-*12/manifest.json")).read_text())
    assert {"workers/0/error/linear0.weight", "workers/1/error/linear0.weight", "compress/workers"} <= set(manifest["arrays"])


def test_configuration_takes_the_keys(config: Path) -> None:
    found = load_config(config, ["comm.compress=topk:0.01", "comm.compress_feedback=false"])
    assert (found.comm.compress, found.comm.compress_feedback, found.comm.compress_after) == ("topk:0.01", False, 0)


def test_the_wait_for_buckets_is_that_of_one_sum_after_the_other_from_when_each_was_ready() -> None:
    step = StepTimes(ready=[10.0, 11.0, 11.5], start=[], end=[], backward_end=12.0)
    assert waited([step], [2.0, 1.0, 0.5]) == pytest.approx(1.5) and waited([step], [0.5, 0.5, 0.25]) == 0
    assert waited([step], [0.0, 0.0, 3.0]) == pytest.approx(2.5) and waited([], [1.0]) == 0
