"""Ranks that come to hold different bits: named with parameter and steps before anything wrong is saved or called a result."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
from launch import ROOT, Job, Result, clean_environment, find_mpirun
from runs import SMALL, record, start, write
from standing import train

from mpitrain.checkpoint import folders
from mpitrain.checkpoint.copies import RATES, Difference
from mpitrain.data.importers import import_text
from mpitrain.train.observers.agreement import said

OWN = SMALL.replace('name = "mlp"', 'name = "own.py:network"') + 'observers = ["own.py:Faults"]\n'
TIED = """
[model]
name = "gpt"
layers = 1
heads = 2
width = 16
block = 8
vocabulary = 40
[data]
path = "text"
validation = "tail:0.1"
[train]
batch_size = 8
steps = 6
micro_batches = 4
reproducible = "layout"
"""
SHORT = ("run.out=a", "train.steps=40", "train.eval_every=0", "checkpoint.every=20", "checkpoint.best=false")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "tests/train/diverging.py", tmp_path / "own.py")
    return write(tmp_path, OWN)


def flip(rank: int, step: int, parameter: int = 0, element: int = 5, bit: int = 3) -> dict[str, str]:
    return {"FLIP": json.dumps([rank, step, parameter, element, bit])}


def named(result: Result, *words: str) -> str:
    """The one line of a job that ended because copies differ."""
    assert result.rc == 76 and len(result.error_lines) == 1, (result.rc, result.out, result.err)
    line = result.error_lines[0]
    assert line.startswith("mpitrain: E_DESYNC rank=0/") and all(word in line for word in words), line
    assert len(line) <= 500
    return line


@pytest.mark.promise("D2")
def test_one_flipped_bit_is_named_with_its_rank_before_the_next_checkpoint_is_published(config: Path) -> None:
    result = train(3, config, *SHORT, "train.micro_batches=3", env=flip(1, 30))
    named(result, "step=40", "rank 1 (", "has other bits than ranks 0, 2 in the parameter", "all ranks agreed after step 20",
          "--resume: it goes on from the checkpoint of step 20")
    assert [folders.step_of(path) for path in folders.candidates(config.parent / "a/checkpoints")] == [20]
    again = train(3, config, *SHORT, "train.micro_batches=3", "--resume")
    whole = train(3, config, *SHORT, "run.out=b", "train.micro_batches=3")
    assert again.rc == whole.rc == 0, again.err + whole.err
    hashes = [record(config.parent / out)["parameters_sha256"] for out in "ab"]
    assert hashes[0] == hashes[1]


def test_of_two_copies_nobody_can_say_which_is_right(config: Path) -> None:
    result = train(2, config, *SHORT, env=flip(1, 40, parameter=2))
    line = named(result, "step=40", "ranks 0, 1 (", 'have different bits in the parameter "head.weight", and it cannot be told')
    assert "the first of" not in line                         # it flipped after the last update


@pytest.mark.promise("D2")
@pytest.mark.parametrize("every, at", [("5", 15), ("auto", 100), ("0", 110)])
def test_ranks_compare_every_so_many_steps_and_at_the_end(config: Path, every: str, at: int) -> None:
    result = train(2, config, "run.out=a", "train.steps=110", "checkpoint.best=false", f"train.compare_every={every}",
                   env=flip(0, 12))
    named(result, f"step={at}", f"all ranks agreed after step {10 if every == '5' else 0}", "there is no checkpoint yet")


@pytest.mark.promise("D2")
def test_a_run_that_is_stopped_after_a_flip_saves_nothing(config: Path) -> None:
    job = start(2, config, "run.out=a", "train.steps=100000", "checkpoint.best=false", "train.compare_every=0", env=flip(1, 20))
    job.wait_for("step 40/")
    job.signal(signal.SIGUSR1)
    named(job.finish(), "rank", "there is no checkpoint yet")
    assert folders.candidates(config.parent / "a/checkpoints") == []


@pytest.mark.promise("D2", "A7")
def test_a_schedule_that_differs_on_one_rank_is_named_with_both_rates(config: Path) -> None:
    each = [sys.executable, "-m", "mpitrain", "train", str(config), *SHORT, "optimizer.schedule=own.py:rates",
            "optimizer.warmup_steps=0", "train.micro_batches=3"]
    command = [find_mpirun(), "-n", "2", *each, ":", "-n", "1", "-x", "RANK_RATE=3", *each]
    result = Job(command, clean_environment(), config.parent).finish(60)
    named(result, "step=20", "rank 2 (", "has the learning rate 0.009, and ranks 0, 1 0.003, in step 8",
          "optimizer.schedule gives ranks different rates")


@pytest.mark.promise("D2")
@pytest.mark.parametrize("ranks, keys, agreed, who", [
    (4, ["mesh.tp=2", "train.micro_batches=2"], 20, "ranks 1, 3 ("),
    (4, ["mesh.pp=2", "train.micro_batches=4"], 20, "ranks 2, 3 ("),
    (2, ["comm.sharding=optimizer", "train.compare_every=1"], 29, "ranks 0, 1 ("),
    (3, ["train.reproducible=layout", "train.micro_batches=4"], 20, "rank 2 (")], ids=["tp", "pp", "optimizer", "layout"])
def test_copies_of_parts_are_compared_among_the_ranks_that_hold_them(config: Path, ranks: int, keys: list[str], agreed: int,
                                                                     who: str) -> None:
    result = train(ranks, config, *SHORT, *keys, env=flip(ranks - 1, 30))
    named(result, who, f"all ranks agreed after step {agreed}")


@pytest.mark.promise("D2")
def test_a_parameter_with_two_places_in_a_ranks_memory_is_compared_place_by_place(tmp_path: Path) -> None:
    """In layout mode that is the embedding of a language model, which its output uses too."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    import_text(tmp_path / "text.txt", tmp_path / "text", level="char", overwrite=False)
    config = write(tmp_path, TIED)
    for ranks in (1, 2):
        result = train(ranks, config, f"run.out=on{ranks}", "train.compare_every=2")
        assert result.rc == 0, result.err
    assert record(tmp_path / "on1")["parameters_sha256"] == record(tmp_path / "on2")["parameters_sha256"]


def test_one_copy_on_a_node_has_no_other_to_be_compared_with(config: Path) -> None:
    result = train(2, config, *SHORT, "comm.node_shared=true", env=flip(1, 30))
    assert result.rc == 0 and "flipped" in result.out, result.err


def test_a_run_without_a_fault_has_the_bits_of_one_that_never_compares(config: Path) -> None:
    for out, every in (("a", "1"), ("b", "0")):
        result = train(2, config, *SHORT, f"run.out={out}", f"train.compare_every={every}")
        assert result.rc == 0 and result.error_lines == []
    assert record(config.parent / "a")["parameters_sha256"] == record(config.parent / "b")["parameters_sha256"]


@pytest.mark.parametrize("found, words", [
    (Difference("optimizer/momentum/net.w", [[0, 1, 3], [2]], list("abcd"), 4, []),
     "rank 2 (c) has other bits than ranks 0, 1, 3 in the optimizer's state \"momentum/net.w\" (the first of 4 arrays that "
     "differ)"),
    (Difference("buffers/mean", [[0, 1], [2, 3]], list("aabb"), 1, []),
     "ranks 0, 1, 2, 3 (a, b) have different bits in the buffer \"mean\", and it cannot be told which are right: no bits are "
     "those of most"),
    (Difference(RATES, [[1, 2], [0]], list("abc"), 1, [[.1, .2, .5], [.1, .3, .5], [.1, .3, .5]]),
     "rank 0 (a) has the learning rate 0.2, and ranks 1, 2 0.3, in step 8: optimizer.schedule gives ranks different rates")])
def test_the_minority_is_named(found: Difference, words: str) -> None:
    assert said(found, agreed=6) == words
