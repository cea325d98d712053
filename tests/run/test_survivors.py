"""Runs that go on when a rank is lost: killed ranks under Open MPI's ULFM, and what ranks hold together."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from launch import Result, mpirun
from runs import SMALL, lines, record, write

from mpitrain.checkpoint.parts import Piece
from mpitrain.checkpoint.spare import Spares, different, newest_whole

ONLY_OPEN_MPI = pytest.mark.skipif("not __import__('launch').is_open_mpi()", reason="needs Open MPI: its mpirun --with-ft ulfm")
OWN = """
import gc
import os
import signal
from pathlib import Path

from mpi4py import MPI

from mpitrain.nn import Parameter
from mpitrain.train import Observer


class Faults(Observer):
    def after_step(self, step, result, seconds):
        if str(step) == os.environ.get("SPOIL"):
            del os.environ["SPOIL"]
            next(one for one in gc.get_objects() if type(one) is Parameter).array[...] = float("nan")

    def before_step(self, step):
        rank = os.environ["OMPI_COMM_WORLD_RANK"]
        if f"{rank}:{step}" == os.environ.get("DAMAGE"):
            os.truncate(next(Path("run/checkpoints").glob("step-*/part-*")), 1000)
        if f"{rank}:{step}" in os.environ.get("KILL", "").split():
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{rank}:{step}" == os.environ.get("RAISE"):
            raise ValueError("mine alone")
        if f"{rank}:{step}" == os.environ.get("STOP"):
            os.kill(os.getppid(), signal.SIGUSR1)
        if str(step) == os.environ.get("WAIT"):                # a loss is noticed before the next forward pass, once
            del os.environ["WAIT"]
            MPI.COMM_WORLD.Recv(bytearray(1), source=0)
"""


def run(folder: Path, n: int, *arguments: str, verb: str = "train", out: str = "run", ulfm: bool = True, **env: str) -> Result:
    (folder / "own.py").write_text(OWN)
    return mpirun(n, "-m", "mpitrain", verb, write(folder, SMALL), f"run.out={out}", "train.steps=30",
                  "train.eval_every=15", "train.micro_batches=6", "train.reproducible=layout", "train.on_lost=go_on",
                  "log.observers=own.py:Faults", *arguments, cwd=folder, env=env,
                  mpi_args=("--with-ft", "ulfm") if ulfm else ())


@ONLY_OPEN_MPI
@pytest.mark.promise("A2")
def test_ranks_that_are_left_go_on_to_the_same_bits(tmp_path: Path) -> None:
    quiet = run(tmp_path, 3, out="quiet")
    assert quiet.rc == 0 and "lost" not in record(tmp_path / "quiet"), quiet.err
    result = run(tmp_path, 3, KILL="0:25")                    # the first rank, which has the run folder and writes the metrics
    assert result.rc == 0 and not result.error_lines, result.err
    found, right = record(tmp_path / "run"), record(tmp_path / "quiet")
    assert found["lost"] == [{"step": 24, "ranks": [0], "left": 2, "resumed": 20, "from": "memory"}]
    assert found["status"] == "done" and found["ranks"] == 2
    assert found["parameters_sha256"] == right["parameters_sha256"]
    keys = [(line["step"], line.get("split")) for line in lines(tmp_path / "run")]
    assert keys == [(line["step"], line.get("split")) for line in lines(tmp_path / "quiet")]
    assert "rank 0 was lost after step 24; 2 left go on from step 20 (of memory)" in result.out


@ONLY_OPEN_MPI
@pytest.mark.promise("A2", "B5")
@pytest.mark.parametrize(("damage", "resumed"), [("0:26", (20, "memory")),
                                                 pytest.param("", (24, "a checkpoint"), marks=pytest.mark.slow)])
def test_a_copy_in_memory_is_taken_where_a_newer_checkpoint_is_damaged(tmp_path: Path, damage: str,
                                                                       resumed: tuple[int, str]) -> None:
    result = run(tmp_path, 3, "checkpoint.every=24", "checkpoint.asynchronous=false", DAMAGE=damage, KILL="0:26")
    assert result.rc == 0 and not result.error_lines, result.err
    lost, = record(tmp_path / "run")["lost"]
    assert (lost["resumed"], lost["from"]) == resumed
    assert ("newer checkpoints cannot be used (step-00000024" in result.err) == bool(damage)


@ONLY_OPEN_MPI
@pytest.mark.promise("A2", "D1")
@pytest.mark.parametrize("spoil", ["20", pytest.param("0", marks=pytest.mark.slow)])
def test_a_copy_of_parameters_that_are_not_finite_is_not_taken(tmp_path: Path, spoil: str) -> None:
    result = run(tmp_path, 3, "log.every=7", "optimizer.clip_norm=0", "checkpoint.asynchronous=false", SPOIL=spoil, KILL="0:21",
                 WAIT="21")
    assert result.rc == 0 and not result.error_lines, result.err
    resumed = [one["resumed"] for one in record(tmp_path / "run")["lost"]]
    assert resumed == [15 if spoil == "20" else 20]           # the best one of the evaluations is on the disk


@ONLY_OPEN_MPI
@pytest.mark.promise("A2")
def test_folds_go_on_without_a_rank_that_is_lost_in_the_first_of_them(tmp_path: Path) -> None:
    result = run(tmp_path, 3, "--k", "2", verb="folds", KILL="1:25")
    assert result.rc == 0 and not result.error_lines, result.err
    first, second = (record(tmp_path / "run" / f"fold-{i}") for i in (1, 2))
    assert first["lost"] == [{"step": 24, "ranks": [1], "left": 2, "resumed": 20, "from": "memory"}]
    assert second["ranks"] == 2 and "lost" not in second and (tmp_path / "run" / "folds.json").is_file()


CODES = """if True:
    import sys
    from mpitrain.comm.job.start import set_for_survivors, start
    from mpitrain.errors import MpitrainError, PeerError
    from mpitrain.run.survivors import Survivors
    import os
    set_for_survivors(os.environ)
    survivors = Survivors(None, start().comm)
    code = int(sys.argv[1 + survivors.comm.rank])
    if code:
        error = MpitrainError("mine")
        error.exit_code = code
        survivors._end_with_the_others(error)
    else:
        try:
            print(f"all {survivors._agree(True, None)}", flush=True)
        except PeerError as error:
            print(f"heard {error.exit_code}", flush=True)
    survivors.comm.Barrier()
"""


@ONLY_OPEN_MPI
@pytest.mark.promise("A1")
@pytest.mark.parametrize(("codes", "heard"), [
    (("0", "75", "85"), "heard 75"), *(pytest.param(*one, marks=pytest.mark.slow) for one in [
        (("0", "255", "65"), "heard 65"), (("143", "0", "0"), "heard 143"), (("0", "0", "0"), "all True")])])
def test_of_ranks_that_fail_differently_at_once_the_others_hear_one_code(codes: tuple[str, ...], heard: str) -> None:
    result = mpirun(3, "-c", CODES, *codes, mpi_args=("--with-ft", "ulfm"))
    assert result.rc == 0 and result.out.split("\n")[:-1] == [heard] * codes.count("0"), result.err


@ONLY_OPEN_MPI
@pytest.mark.slow
@pytest.mark.promise("A2")
@pytest.mark.parametrize(("n", "kill", "arguments", "lost"), [
    (4, "1:5", (), [([1], 0, "the beginning")]),
    (4, "3:28", ("train.copy_every=0", "checkpoint.every=10"), [([3], 20, "a checkpoint")]),
    (4, "3:12 0:22", (), [([3], 10, "memory"), ([0], 20, "memory")]),
    (2, "0:28", (), [([0], 20, "memory")]),
    (4, "2:28", ("comm.sharding=optimizer",), [([2], 20, "memory")]),
    (4, "3:12 1:28", ("comm.sharding=optimizer", "comm.node_shared=true"), [([3], 10, "memory"), ([1], 20, "memory")]),
    (3, "1:28", ("comm.node_shared=true",), [([1], 20, "memory")]),
    (3, "2:14 0:28", ("comm.progress=thread",), [([2], 10, "memory"), ([0], 20, "memory")]),
])
def test_more_ways_to_go_on(tmp_path: Path, n: int, kill: str, arguments: tuple[str, ...],
                            lost: list[tuple[list[int], int, str]]) -> None:
    assert run(tmp_path, 1, out="quiet").rc == 0
    result = run(tmp_path, n, *arguments, KILL=kill)
    assert result.rc == 0 and not result.error_lines, result.err
    found = record(tmp_path / "run")
    assert [(one["ranks"], one["resumed"], one["from"]) for one in found["lost"]] == lost
    assert found["parameters_sha256"] == record(tmp_path / "quiet")["parameters_sha256"]
    keys = [(line["step"], line.get("split")) for line in lines(tmp_path / "run")]
    assert len(set(keys)) == len(keys) == 32


@ONLY_OPEN_MPI
@pytest.mark.slow
@pytest.mark.promise("A1")
@pytest.mark.parametrize("kill", ["2:12", "2:22"])
def test_an_error_of_a_rank_is_no_loss_and_ends_the_job_also_where_another_one_is_lost_at_once(tmp_path: Path, kill: str) -> None:
    result = run(tmp_path, 3, KILL=kill, RAISE="1:22")
    assert result.rc == 70 and len(result.error_lines) == 1, result.err
    assert "E_USER rank=1/3" in result.error_lines[0] and "mine alone" in result.error_lines[0]


@ONLY_OPEN_MPI
@pytest.mark.promise("A1", "A2")
@pytest.mark.parametrize(("fault", "code", "says"), [({"RAISE": "1:12"}, 70, "E_USER rank=1/4 .* mine alone"),
                                                     ({"KILL": "1:12"}, 75, "E_PEER rank=./4 .*")])
def test_where_nobody_goes_on_a_failing_rank_ends_the_others_under_ulfm_too(tmp_path: Path, fault: dict[str, str], code: int,
                                                                           says: str) -> None:
    """mpirun leaves them alone, and MPI tells them of a killed rank only; a rank that has an error tells them itself."""
    result = run(tmp_path, 4, "train.on_lost=stop", **fault)
    assert result.rc == code and len(result.error_lines) == 1, result.err
    assert re.fullmatch(f"mpitrain: {says}", result.error_lines[0])


@ONLY_OPEN_MPI
@pytest.mark.slow
@pytest.mark.promise("E1")
def test_a_stop_on_request_is_no_loss_either(tmp_path: Path) -> None:
    result = run(tmp_path, 4, STOP="0:12")
    assert result.rc == 85 and len(result.error_lines) == 1 and "E_STOPPED rank=0/4" in result.error_lines[0], result.err


@ONLY_OPEN_MPI
@pytest.mark.slow
@pytest.mark.promise("A2")
def test_a_mesh_that_the_others_do_not_fit_ends_the_run_with_one_line(tmp_path: Path) -> None:
    result = run(tmp_path, 2, "mesh.pp=2", KILL="1:12")
    assert result.rc == 75 and len(result.error_lines) == 1, result.err
    assert "rank 1 was lost, and the others cannot go on: mesh pp=2" in result.error_lines[0]


@ONLY_OPEN_MPI
@pytest.mark.promise("A2")
def test_without_ulfm_it_is_refused_with_the_command(tmp_path: Path) -> None:
    result = run(tmp_path, 2, ulfm=False)
    assert result.rc == 64 and '"mpirun --with-ft ulfm -n 2 ..."' in result.error_lines[0] and not (tmp_path / "run").exists()


def test_one_rank_needs_no_ulfm_also_where_it_fails(tmp_path: Path) -> None:
    """The methods of ULFM raise NotImplementedError in other MPIs, in place of the error of the run."""
    without = ("import sys; sys.modules['mpitrain.run.survivors'] = None; from mpitrain.cli import main; "
               "from mpitrain.comm.job.guard import Process; process = Process(); "
               "process.run(lambda: main(sys.argv[1:], process))")
    result = mpirun(1, "-c", without, "train", write(tmp_path, SMALL), "run.out=a", "train.on_lost=go_on", "optimizer.lr=1e30",
                    "optimizer.warmup_steps=0", "optimizer.clip_norm=0", cwd=tmp_path)
    assert result.rc == 79 and len(result.error_lines) == 1 and "E_NAN" in result.error_lines[0], result.err


def test_the_newest_step_that_ranks_hold_together() -> None:
    expected = {"a": (4,), "b": ()}
    whole, half, other = {"a": ["a", 4], "b": ["b", 1]}, {"a[0:2]": ["a", 2], "b": ["b", 1]}, {"a[2:4]": ["a", 2]}
    assert newest_whole([{"10": whole, "20": half}, {"10": whole}], expected) == (10, {"a": 0, "b": 0})
    assert newest_whole([{"10": whole, "20": half}, {"20": other}], expected) == (20, {"a[0:2]": 0, "b": 0, "a[2:4]": 1})
    assert newest_whole([{"20": half}, {"20": half}], expected) is None
    assert newest_whole([{}, {}], expected) is None


def test_the_last_two_copies_are_kept_whatever_becomes_of_the_array() -> None:
    spares, array = Spares(), np.zeros(3)
    for step in (10, 20, 30):
        array[:] = step
        spares.keep(step, {"step": step}, {"a": Piece.whole("a", array)})
    assert [(spare.step, spare.pieces["a"].array[0]) for spare in spares.kept] == [(20, 20), (30, 30)]
    assert not different([spares.kept[0].sums()] * 2) and different([spare.sums() for spare in spares.kept]) == "a"
