"""How a run's gradients travel: by messages, through shared memory, or into one copy per node; what each may change, and not."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from launch import Result
from runs import SMALL, mpirun, record, steps, write
from standing import train

from mpitrain.checkpoint import store
from mpitrain.parallel.policies.choose import change

NOTE = "comm.node_shared: every rank keeps a copy of its own"


def ok(result: Result) -> Result:
    assert result.rc == 0 and result.error_lines == [], result.out + result.err
    return result


WIDE = SMALL.replace("hidden = [32]", "hidden = [8000]").replace("steps = 50", "steps = 2")       # 2.3 MiB of parameters


def train_with(mib: int, n: int, config: Path, *arguments: str) -> Result:
    """A run that finds so much shared memory free each time it asks."""
    return train_on(f"'free': lambda: {mib} << 20", n, config, *arguments)


def train_on(node: str, n: int, config: Path, *arguments: str) -> Result:
    """A run on nodes made with these keywords; `rank` is this rank's number."""
    program = ("import os; rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
               f"from mpitrain.comm.shared.node import Node; Node.__init__.__kwdefaults__.update({{{node}}})\n"
               "import runpy; runpy.run_module('mpitrain', run_name='__main__', alter_sys=True)")
    return mpirun(n, "-c", program, "train", config, *arguments, cwd=config.parent)


def shared(result: Result) -> Result:
    """Of a run that kept one copy per node, and did not fall back to one per rank."""
    assert NOTE not in ok(result).out, result.out
    return result


def refused(result: Result, rc: int, code: str, text: str) -> None:
    """Ended before it began, with this in its one line."""
    assert (result.rc, len(result.error_lines)) == (rc, 1), result.err
    assert f" {code} " in result.error_lines[0] and text in result.error_lines[0], result.error_lines[0]


@pytest.mark.parametrize("mib", [0, 2, 5])                    # for nothing, for the flags, for parameters and state besides
def test_one_copy_per_node_is_refused_where_there_is_too_little_room_wherever_that_shows(tmp_path: Path, mib: int) -> None:
    result = train_with(mib, 3, write(tmp_path, WIDE), "run.out=a", "comm.node_shared=true")
    refused(result, 74, "E_IO", f"/dev/shm has {mib} MiB free where {dict(zip((0, 2, 5), (2, 4, 8)))[mib]} MiB are needed; ")
    line = result.error_lines[0]
    assert "comm.node_shared = true: no shared memory for " in line and '"--shm-size" of a container' in line
    assert line.endswith("; or set comm.node_shared = false") and not (tmp_path / "a").exists()


@pytest.mark.slow
def test_the_reason_is_that_of_the_node_that_has_no_room_and_names_it(tmp_path: Path) -> None:
    result = train_on("'color': rank // 2, 'free': lambda: (rank < 2) << 40", 4, write(tmp_path), "run.out=a",
                      "comm.node_shared=true")
    refused(result, 74, "E_IO", f"no shared memory for gradients on {socket.gethostname()}: /dev/shm has 0 MiB free where ")


@pytest.mark.slow
def test_a_folder_that_is_missing_is_what_a_run_says(tmp_path: Path) -> None:
    config, none = write(tmp_path), tmp_path / "none"
    env = {"OMPI_MCA_osc_sm_backing_directory": str(none)}
    said = f"there is no folder {none}; let OMPI_MCA_osc_sm_backing_directory name one that is there"
    refused(train(2, config, "run.out=a", "comm.node_shared=true", env=env), 74, "E_IO", said)
    assert f"messages instead: {said}" in ok(train(2, config, "run.out=a", "train.steps=3", env=env)).out


@pytest.mark.slow
def test_without_a_folder_for_a_lock_file_one_copy_per_node_is_refused(tmp_path: Path) -> None:
    program = ("import tempfile; from mpitrain.comm.shared import alive; alive._new_file = lambda: None\n"
               "import runpy; runpy.run_module('mpitrain', run_name='__main__', alter_sys=True)")
    result = mpirun(2, "-c", program, "train", write(tmp_path), "run.out=a", "comm.node_shared=true", cwd=tmp_path)
    refused(result, 74, "E_IO", "no folder for a lock file: neither /dev/shm nor ")


@pytest.mark.slow
def test_nodes_of_unequal_size_and_a_cpu_that_reorders_stores_are_reasons_to_refuse_one_copy_per_node(tmp_path: Path) -> None:
    config = write(tmp_path)
    refused(train_on("'color': min(rank, 1)", 3, config, "run.out=a", "comm.node_shared=true"), 78, "E_CONFIG",
            "comm.node_shared = true needs memory that the ranks of each node share: nodes have from 1 to 2 ranks; set "
            "comm.node_shared = false")
    program = ("from mpitrain.comm.shared import channel, engine; channel.kernels = lambda: None\n"
               "engine.can_poll = lambda: False\n"
               "import runpy; runpy.run_module('mpitrain', run_name='__main__', alter_sys=True)")
    result = mpirun(2, "-c", program, "train", config, "run.out=a", "comm.node_shared=true", cwd=tmp_path)
    refused(result, 78, "E_CONFIG", "share: no C compiler, and this CPU may reorder stores; set comm.node_shared = false")


@pytest.mark.slow
def test_with_one_rank_on_each_node_one_copy_per_node_is_a_copy_per_rank(tmp_path: Path) -> None:
    result = ok(train_on("'color': rank", 2, write(tmp_path), "run.out=a", "comm.node_shared=true", "train.steps=3"))
    assert NOTE in result.out and "gradients: one rank on each node, messages instead" in result.out


@pytest.mark.parametrize("clip", ["optimizer.clip_norm=0.5", pytest.param("optimizer.clip_norm=0", marks=pytest.mark.slow)])
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


@pytest.mark.slow
def test_two_ranks_have_the_same_bits_by_messages_and_through_memory(tmp_path: Path) -> None:
    config = write(tmp_path)
    for name, option in (("a", "comm.algorithm=auto"), ("b", "comm.algorithm=ring"), ("c", "comm.algorithm=tree"),
                         ("d", "comm.algorithm=hierarchical"), ("e", "comm.algorithm=mpi")):
        ok(train(2, config, f"run.out={name}", option))
    assert len({record(tmp_path / name)["parameters_sha256"] for name in "abcde"}) == 1


@pytest.mark.slow
@pytest.mark.promise("D5")
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


@pytest.mark.parametrize(("argument", "message"), [
    ("comm.algorithm=ring", 'gradients in memory that ranks share, found comm.algorithm = "ring"; set comm.algorithm = "auto"'),
    ("comm.progress=thread", 'while gradients are summed, found comm.progress = "thread"; set comm.progress = "poll"'),
    ("comm.bucket_mb=auto", 'while gradients are summed, found comm.bucket_mb = "auto"; set a number for comm.bucket_mb')])
def test_what_one_copy_per_node_cannot_go_with_is_refused_by_its_name_alone(tmp_path: Path, argument: str,
                                                                            message: str) -> None:
    result = train(2, write(tmp_path), "run.out=a", "comm.node_shared=true", argument)
    refused(result, 78, "E_CONFIG", message + ", or comm.node_shared = false")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("mib", [0, 5])
def test_a_run_without_room_to_share_gradients_says_so_with_the_remedy_and_trains_by_messages(tmp_path: Path, mib: int) -> None:
    """With 0 MiB nothing fits, with 5 all but the gradients."""
    result = ok(train_with(mib, 3, write(tmp_path, WIDE), "run.out=a"))
    said = [line for line in result.out.splitlines() if "no shared memory" in line]
    assert len(said) == 1 and f"messages instead: /dev/shm has {mib} MiB free where " in said[0] and "--shm-size" in said[0]


@pytest.mark.parametrize("node_shared", ["false", "true"])
def test_layout_mode_takes_no_shared_memory_for_gradients_that_go_by_messages(tmp_path: Path, node_shared: str) -> None:
    options = ("train.reproducible=layout", "train.micro_batches=3", f"comm.node_shared={node_shared}")
    result = ok(train_with(5, 3, write(tmp_path, WIDE), "run.out=a", *options))
    assert "no shared memory" not in result.out
    assert record(tmp_path / "a")["choices"]["exchange"]["way"] == "messages, one tree over all micro-batches"


@pytest.mark.slow
@pytest.mark.promise("B9")
def test_how_gradients_are_summed_is_recorded_and_another_way_after_a_resume_is_said_in_one_line(tmp_path: Path) -> None:
    config = write(tmp_path, SMALL.replace("steps = 50", "steps = 5"))
    ok(train(3, config, "run.out=a"))
    assert record(tmp_path / "a")["choices"]["exchange"] == {"ranks": 3, "way": "shared memory of ranks 0-2", "wire": "float32"}
    same = ok(train(3, config, "run.out=a", "train.steps=6", "--resume"))
    other = ok(train_with(0, 3, config, "run.out=a", "train.steps=7", "--resume"))
    fewer = ok(train(2, config, "run.out=a", "train.steps=8", "--resume"))
    said = [[line for line in result.out.splitlines() if "gradients were summed" in line] for result in (same, other, fewer)]
    assert [len(lines) for lines in said] == [0, 1, 0]
    assert "by shared memory of ranks 0-2 (float32), and are by messages, auto (float32): from here on" in said[1][0]
    written = store.latest(tmp_path / "a/checkpoints").meta["choices"]["exchange"]
    assert written["ranks"] == 2 and written == record(tmp_path / "a")["choices"]["exchange"]


def test_only_a_way_that_changes_bits_is_a_change() -> None:
    shared, sent = ({"ranks": 3, "way": way, "wire": "float32"} for way in ("shared memory of ranks 0-2", "messages, auto"))
    assert change(shared, sent) and change(sent, {**sent, "wire": "bfloat16"})
    assert not change(shared, shared) and not change(None, sent) and not change(shared, {**sent, "ranks": 4})
    two = [{**way, "ranks": 2} for way in (shared, sent)]
    assert not change(*two) and change(two[0], {**two[1], "wire": "bfloat16"})


@pytest.mark.slow
def test_a_wire_of_16_bits_that_nothing_travels_on_is_said_in_one_line_and_not_recorded(tmp_path: Path) -> None:
    config = write(tmp_path, SMALL.replace("steps = 50", "steps = 2"))
    for name, option, wire, said in (("a", "comm.algorithm=auto", "float32", "gradients go through shared memory"),
                                     ("b", "comm.algorithm=ring", "bfloat16", ""),
                                     ("c", "train.precision=float64", "float64", "it is for gradients of float32")):
        result = ok(train(2, config, f"run.out={name}", "comm.wire_dtype=bfloat16", option))
        assert record(tmp_path / name)["choices"]["exchange"]["wire"] == wire
        found = [line for line in result.out.splitlines() if "comm.wire_dtype" in line]
        assert len(found) == bool(said) and all(f'comm.wire_dtype = "bfloat16" has no effect: {said}' in line for line in found)
