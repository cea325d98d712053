"""What a run measures and chooses: written down, taken over when it goes on, and of no influence where it must have none."""

from __future__ import annotations

import shutil

import pytest
from runs import SMALL, record, write
from standing import train

from mpitrain.checkpoint import store

AUTO = ("comm.progress=auto", "comm.bucket_mb=auto", "train.steps=40", "checkpoint.every=30", "checkpoint.keep=9")


def ok(result):
    assert result.rc == 0 and result.error_lines == [], result.out + result.err
    return result


def test_a_resumed_run_takes_over_what_was_chosen_and_ends_with_the_same_bits(tmp_path):
    config = write(tmp_path)
    ok(train(3, config, "run.out=a", *AUTO))                   # three ranks: where buckets are cut can change bits
    chosen = record(tmp_path / "a")["choices"]
    assert chosen["buckets"]["bounds"][-1] == 4 and chosen["buckets"]["ranks"] == 3
    assert chosen["progress"]["choice"] in ("poll", "thread")
    kept = store.latest(tmp_path / "a/checkpoints").meta["choices"]
    assert kept == chosen
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for path in (tmp_path / "b/checkpoints").iterdir():
        if path.name != "step-00000030":
            shutil.rmtree(path)
    ok(train(3, config, "run.out=b", *AUTO, "--resume"))
    assert record(tmp_path / "b")["choices"] == chosen
    assert record(tmp_path / "b")["parameters_sha256"] == record(tmp_path / "a")["parameters_sha256"]


def test_a_thread_that_moves_messages_changes_no_bit(tmp_path):
    config = write(tmp_path, SMALL.replace("steps = 50", "steps = 10"))
    for progress in ("poll", "thread"):
        ok(train(3, config, f"run.out={progress}", f"comm.progress={progress}", "comm.bucket_mb=0.00001"))
        assert list(record(tmp_path / progress)["choices"]) == ["exchange"]
    assert record(tmp_path / "poll")["parameters_sha256"] == record(tmp_path / "thread")["parameters_sha256"]


@pytest.mark.parametrize("progress", ["thread", "auto"])
def test_one_rank_has_nothing_to_choose(tmp_path, progress):
    ok(train(1, write(tmp_path), "run.out=a", "train.steps=30", f"comm.progress={progress}", "comm.bucket_mb=auto"))
    assert record(tmp_path / "a")["choices"] == {}
