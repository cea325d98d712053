"""How a run's gradients travel: by messages, through shared memory, or into one copy per node; what each may change, and not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from launch import Result
from runs import record, steps, train, write

from mpitrain.errors import ConfigError
from mpitrain.train import layout

NOTE = "comm.node_shared: every rank keeps a copy of its own"


def ok(result: Result) -> Result:
    assert result.rc == 0 and result.error_lines == [], result.out + result.err
    return result


def shared(result: Result) -> Result:
    """Of a run that kept one copy per node, and did not fall back to one per rank."""
    assert NOTE not in ok(result).out, result.out
    return result


def test_a_run_that_cannot_share_memory_says_that_every_rank_keeps_a_copy(tmp_path: Path) -> None:
    result = ok(train(2, write(tmp_path), "run.out=a", "comm.node_shared=true", "train.steps=3",
                      env={"OMPI_MCA_osc_sm_backing_directory": str(tmp_path / "none")}))
    assert NOTE in result.out and "messages instead: " in result.out


@pytest.mark.parametrize("clip", ["optimizer.clip_norm=0", "optimizer.clip_norm=0.5"])
def test_one_copy_per_node_gives_the_bits_of_a_copy_per_rank_also_when_resumed(tmp_path: Path, clip: str) -> None:
    config = write(tmp_path)
    options = (clip, "comm.bucket_mb=0.005", "log.every=7", "checkpoint.every=30", "checkpoint.keep=9")
    ok(train(3, config, "run.out=a", *options))
    shared(train(3, config, "run.out=b", *options, "comm.node_shared=true"))
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    for path in (tmp_path / "c/checkpoints").iterdir():
        if path.name != "step-00000030":
            shutil.rmtree(path)
    shared(train(3, config, "run.out=c", *options, "comm.node_shared=true", "--resume"))
    hashes = {name: record(tmp_path / name)["parameters_sha256"] for name in "abc"}
    assert len(set(hashes.values())) == 1, hashes
    assert [line["grad_norm"] for line in steps(tmp_path / "a")] == [line["grad_norm"] for line in steps(tmp_path / "b")]


def test_two_ranks_have_the_same_bits_by_messages_and_through_memory(tmp_path: Path) -> None:
    config = write(tmp_path)
    for name, option in (("a", "comm.algorithm=auto"), ("b", "comm.algorithm=ring"), ("c", "comm.algorithm=tree"),
                         ("d", "comm.algorithm=hierarchical"), ("e", "comm.algorithm=mpi")):
        ok(train(2, config, f"run.out={name}", option))
    assert len({record(tmp_path / name)["parameters_sha256"] for name in "abcde"}) == 1


def test_layout_mode_keeps_its_bits_with_one_copy_per_node(tmp_path: Path) -> None:
    config = write(tmp_path)
    mode = ("train.reproducible=layout", "train.micro_batches=6")
    ok(train(1, config, "run.out=a", *mode))
    shared(train(3, config, "run.out=b", *mode, "comm.node_shared=true"))
    assert record(tmp_path / "a")["parameters_sha256"] == record(tmp_path / "b")["parameters_sha256"]


def test_sixteen_bits_on_the_wire_train_nearly_the_same(tmp_path: Path) -> None:
    config = write(tmp_path)
    ok(train(2, config, "run.out=a", "comm.algorithm=ring"))
    ok(train(2, config, "run.out=b", "comm.algorithm=ring", "comm.wire_dtype=bfloat16"))
    a, b = (steps(tmp_path / name)[-1]["loss"] for name in "ab")
    assert a != b and abs(a - b) < 0.05 * a


@pytest.mark.parametrize(("arguments", "message"), [
    (("comm.node_shared=true", "comm.algorithm=ring"), "needs gradients in memory that ranks share"),
    (("comm.node_shared=true", "comm.progress=thread"), 'set comm.progress = "poll" and a number for comm.bucket_mb'),
    (("comm.node_shared=true", "comm.bucket_mb=auto"), 'set comm.progress = "poll" and a number for comm.bucket_mb')])
def test_what_one_copy_per_node_cannot_go_with_is_refused_in_one_line(tmp_path: Path, arguments: tuple[str, ...],
                                                                      message: str) -> None:
    result = train(2, write(tmp_path), "run.out=a", *arguments)
    assert result.rc == 78 and len(result.error_lines) == 1 and message in result.error_lines[0], result.err
    assert not (tmp_path / "a").exists()


def test_layout_mode_refuses_a_wire_that_rounds() -> None:
    with pytest.raises(ConfigError, match='found comm.wire_dtype = "bfloat16"; leave it "float32"'):
        layout.refuse_options(4, "auto", "bfloat16")
