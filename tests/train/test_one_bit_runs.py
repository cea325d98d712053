"""Whole runs with optimizers that send momenta at 1 bit: their warm-up and bytes, resumed on other ranks, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from runs import SMALL, record, steps, write
from standing import mpirun, train

from mpitrain.checkpoint.manifest import load

pytestmark = pytest.mark.timeout(120)
NAMES = ("onebit_adam", "onebit_lamb", "zeroone_adam")
RUN = SMALL.replace("clip_norm = 1.0\n", "").replace("steps = 50", "steps = 20").replace("eval_every = 25", "eval_every = 10")


@pytest.mark.parametrize(("ours", "plain"), [("onebit_adam", "adamw"), ("onebit_lamb", "lamb")])
def test_the_warm_up_is_adamw_and_lamb_to_the_bit(tmp_path: Path, ours: str, plain: str) -> None:
    config = write(tmp_path, RUN)
    for name, more in ((ours, ("optimizer.freeze=10",)), (plain, ())):
        result = train(2, config, f"run.out={name}", f"optimizer.name={name}", "checkpoint.every=10", "checkpoint.keep=9", *more)
        assert result.rc == 0, result.err
    ten, other = (load(tmp_path / name / "checkpoints/step-00000010") for name in (ours, plain))
    assert ten.hashes["parameters_sha256"] == other.hashes["parameters_sha256"]
    assert record(tmp_path / ours)["parameters_sha256"] != record(tmp_path / plain)["parameters_sha256"]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_taken_up_again_has_the_bits_of_one_that_was_not(tmp_path: Path, name: str) -> None:
    """From a step within a round of 0/1 Adam; then without what the ranks kept; then on two ranks, and on one."""
    config = write(tmp_path, RUN)
    options = (f"optimizer.name={name}", "optimizer.freeze=6", "checkpoint.every=11", "checkpoint.keep=9",
               *(("optimizer.local_every=1",) if name == "zeroone_adam" else ()))
    result = train(3, config, "run.out=a", *options)
    assert result.rc == 0, result.err
    whole = record(tmp_path / "a")
    shutil.rmtree(tmp_path / "a/checkpoints/step-00000020")
    for other in "bc":
        shutil.copytree(tmp_path / "a", tmp_path / other)
    kept = load(tmp_path / "a/checkpoints/step-00000011").arrays
    assert "workers/2/error/linear0.weight" in kept and "compress/error/linear0.weight" in kept
    assert ("drift/2/m/linear0.weight" in kept) == (name == "zeroone_adam")
    result = train(3, config, "run.out=a", *options, "--resume")
    assert result.rc == 0, result.err
    again = record(tmp_path / "a")
    assert again["parameters_sha256"] == whole["parameters_sha256"] and again["metrics"] == whole["metrics"]
    for n, folder in ((2, "b"), (1, "c")):
        result = train(n, config, f"run.out={folder}", *options, "--resume")
        assert result.rc == 0, result.err
        assert record(tmp_path / folder)["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=0.1)


def test_a_run_that_ends_within_a_round_leaves_the_model_of_its_numbers(tmp_path: Path) -> None:
    """Its ranks have parameters of their own then, as they have at a checkpoint in the middle of a round. One rank reads both."""
    config = write(tmp_path, RUN)
    options = ("optimizer.name=zeroone_adam", "optimizer.lr=0.01", "optimizer.freeze=3", "optimizer.local_every=1",
               "optimizer.local_steps=8", "train.eval_every=1")
    result = train(3, config, *options, "run.out=early", "stop.patience=9", "stop.min_delta=10")
    assert result.rc == 0 and "step 10  the run ends" in result.out, result.err
    run = record(tmp_path / "early")
    assert any(name.startswith("drift/") for name in load(tmp_path / "early/checkpoints/step-00000010").arrays)
    assert load(tmp_path / "early/checkpoints/step-00000010").hashes["parameters_sha256"] == run["parameters_sha256"]
    assert evaluated(tmp_path / "early", 3) == evaluated(tmp_path / "early", 1) == run["metrics"]
    result = train(2, config, *options, "run.out=whole", "train.eval_every=8", "checkpoint.keep=9")
    assert result.rc == 0, result.err
    best = load(tmp_path / "whole/checkpoints/step-00000008")
    assert any(name.startswith("drift/") for name in best.arrays)
    assert evaluated(tmp_path / "whole", 1, "--step", "8") == best.meta["metrics"]


def evaluated(folder: Path, n: int, *options: str) -> dict[str, float]:
    """What `evaluate` says on so many ranks."""
    result = mpirun(n, "-m", "mpitrain", "evaluate", folder, *options, cwd=folder)
    assert result.rc == 0, result.err
    return {name: value for name, value in json.loads(result.out).items() if name in ("loss", "accuracy")}


def test_after_the_freeze_a_step_sends_a_thirtieth_and_a_local_one_nothing(tmp_path: Path) -> None:
    config = write(tmp_path, RUN)
    options = ("optimizer.freeze=6", "comm.algorithm=ring", "model.hidden=[256]", "train.eval_every=20")
    for name, more in (("onebit_adam", ()), ("zeroone_adam", ("optimizer.local_steps=2", "optimizer.local_every=1"))):
        result = train(2, config, f"run.out={name}", f"optimizer.name={name}", *options, *more)
        assert result.rc == 0, result.err
    sent = [line["wire_bytes"] for line in steps(tmp_path / "onebit_adam")]
    assert len(set(sent[:6])) == len(set(sent[6:])) == 1
    assert 25 < sent[0] / sent[-1] <= 32                      # small biases have a scale each
    assert sum(sent) < 0.5 * 20 * sent[0]
    local = [line["wire_bytes"] for line in steps(tmp_path / "zeroone_adam")]
    assert local[6:] == [sent[-1], *[0.0, sent[-1]] * 6, sent[-1]]
    assert [line["compress_ratio"] for line in steps(tmp_path / "zeroone_adam")[6:8]] == [pytest.approx(28, abs=4), None]


def test_without_the_floor_of_v_a_run_ends_and_does_not_go_on(tmp_path: Path) -> None:
    config = write(tmp_path, RUN.replace("[32]", "[128, 128]").replace("steps = 20", "steps = 150"))
    options = ("optimizer.name=onebit_adam", "optimizer.freeze=45", "optimizer.lr=1e-2")
    assert train(2, config, "run.out=a", *options).rc == 0
    result = train(2, config, "run.out=b", *options, "optimizer.v_floor=0")
    line, = result.error_lines
    assert result.rc == 79 and "E_NAN" in line


@pytest.mark.parametrize(("option", "words"), [
    ("optimizer.clip_norm=1.0", "of which no gradient can be clipped, found optimizer.clip_norm = 1; set it to 0"),
    ("comm.sharding=optimizer", "of which every rank needs all"), ("comm.node_shared=true", "of which every rank sends its own"),
    ("train.reproducible=layout", "so that bits depend on their number"), ("train.on_nan=skip", "cannot be taken back"),
    ("comm.compress=int8", "so that it is compressed already"), ("train.on_lost=go_on", "that only it has"),
    ("optimizer.freeze=20", "is step 20 of a run of 20"), ("optimizer.freeze=0", "optimizer.freeze is a number of steps"),
    ('optimizer.groups=[{params="head.*", lr_factor=0.1}]', "has one rule for all parameters"),
    ("optimizer.offload=file", "which each bucket is made of"), ("comm.bucket_mb=auto", "in blocks of its buckets"),
    ("shrink.prune=magnitude", "whose signs cannot say 0")])
def test_what_does_not_go_with_them_is_refused_in_one_line(tmp_path: Path, option: str, words: str) -> None:
    more = {"layout": ("train.micro_batches=4",), "magnitude": ("shrink.sparsity=0.5", "shrink.end=10")}
    options = ("optimizer.name=onebit_adam", option, *more.get(option.partition("=")[2], ()))
    config = write(tmp_path, RUN)
    result = train(2, config, *options) if "go_on" not in option else \
        mpirun(1, "-m", "mpitrain", "inspect", config, "--ranks", "2", *options, cwd=tmp_path)
    line, = result.error_lines
    assert result.rc == 78 and "E_CONFIG" in line and words in line, line


def test_what_cannot_follow_ranks_that_drift_is_refused(tmp_path: Path) -> None:
    result = train(2, write(tmp_path, RUN), "optimizer.name=zeroone_adam", "average.kind=ema")
    line, = result.error_lines
    assert result.rc == 78 and "ranks have weights of their own between exchanges" in line
