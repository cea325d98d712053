"""`mpitrain bench allreduce` under mpirun: what it writes, and that it believes no result it has not checked."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from launch import ROOT, Result, launch
from standing import mpirun

from mpitrain.bench.allreduce import known
from mpitrain.comm.messages.algorithms import names

WRONG = Path(__file__).with_name("wrong.py")
FIELDS = ["bench", "algorithm", "bytes", "dtype", "ranks", "seconds", "mpi_seconds", "ratio"]


def bench(n: int, folder: Path, *arguments: str) -> Result:
    return mpirun(n, "-m", "mpitrain", "bench", "allreduce", *arguments, cwd=folder, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3])
def test_each_algorithm_size_and_dtype_is_one_object(n: int, tmp_path: Path) -> None:
    result = bench(n, tmp_path, "--json", "r.json", "--sizes", "8,64K", "--dtypes", "float32,float64", "--pairs", "2")
    assert result.rc == 0 and result.error_lines == [], result.err
    records = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert [(r["algorithm"], r["dtype"], r["bytes"]) for r in records] == [
        (name, dtype, size) for name in known() for dtype in ("float32", "float64") for size in (8, 65536)]
    for r in records:
        assert list(r)[:8] == FIELDS
        assert r["bench"] == "allreduce" and r["ranks"] == n and r["pairs"] == 2
        assert r["seconds"] > 0 and r["mpi_seconds"] > 0
        assert r["mpi_seconds_low"] / r["seconds_high"] <= r["ratio"] <= r["mpi_seconds_high"] / r["seconds_low"]
        assert r["machine"]["hosts"] == 1 and "MPI" in r["machine"]["mpi_library"]
    table = result.out.splitlines()
    assert len(table) == 2 + len(records) and table[2].startswith("ring ") and "64 KiB" in result.out


def test_every_way_that_training_can_be_told_to_take_is_measured() -> None:
    """By its name; what training takes when told nothing is either of two things, which have names of their own."""
    assert set(known()) == {*names(), "messages", "shared"} - {"auto"}
    assert set(known("bfloat16")) == set(known()) - {"mpi", "shared"}


@pytest.mark.parametrize("wire", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_16_bits_on_the_wire_are_measured_beside_float32(wire: str, tmp_path: Path) -> None:
    result = bench(3, tmp_path, "--json", "r.json", "--sizes", "8,64K", "--wire", wire, "--pairs", "2",
                   "--algorithms", "ring,hierarchical,messages")
    assert result.rc == 0 and result.error_lines == [], result.err
    records = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert [(r["algorithm"], r["bytes"]) for r in records] == [(name, size) for name in ("ring", "hierarchical", "messages")
                                                               for size in (8, 65536)]
    for r in records:
        assert r["wire"] == wire and r["dtype"] == "float32" and "mpi_seconds" not in r
        assert r["float32_seconds_low"] / r["seconds_high"] <= r["ratio"] <= r["float32_seconds_high"] / r["seconds_low"]


def test_the_messages_of_one_side_alone_hold_16_bits() -> None:
    """Or a ratio of 1 would be all there is to see."""
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests/bench")!r})
from mpitrain.bench import allreduce
from mpitrain.cli import main
from mpitrain.comm.job.guard import Process
made, make = [], allreduce.Channel
def noted(comm, name, **options):
    made.append((name, options.get("wire")))
    return make(comm, name, **options)
allreduce.Channel = noted
def run():
    main(["bench", "allreduce", "--algorithms", "ring", "--wire", "bfloat16", "--sizes", "8", "--pairs", "1"])
    assert made == [("bench:ring", "bfloat16"), ("bench:ring", None)], made
    return 0
Process().run(run)
"""
    assert mpirun(2, "-c", program).rc == 0


NO_ROOM = """
import sys
from mpitrain.cli import main
from mpitrain.comm.job.guard import Process
from mpitrain.comm.shared.node import Node
Node.__init__.__kwdefaults__["free"] = lambda: {free}
Process().run(lambda: main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("free", [pytest.param(0, marks=pytest.mark.slow), 3 << 20])    # bytes: for nothing; for the flags alone
def test_shared_memory_that_is_not_there_is_left_out_with_a_line_unless_it_was_asked_for(free: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(NO_ROOM.format(free=free))
    command = ("bench", "allreduce", "--sizes", "4M", "--pairs", "1")
    result = mpirun(2, program, *command, cwd=tmp_path, timeout=120)
    assert result.rc == 0 and result.error_lines == [], result.err
    lines = result.out.splitlines()
    assert len(lines) == 2 + len(known()) and re.match(r"shared +left out: .*MiB free where \d+ MiB are needed", lines[-1])
    result = mpirun(2, program, *command, "--algorithms", "shared", cwd=tmp_path)
    assert result.rc == 78 and len(result.error_lines) == 1, result.err
    assert re.search(r'E_CONFIG .*shared was asked for, but bench:shared: .* are needed; .*"--shm-size" .*; or leave it out of '
                     r"--algorithms$", result.error_lines[0])


def test_a_wrong_sum_ends_the_job_with_one_line(tmp_path: Path) -> None:
    result = bench(2, tmp_path, "--algorithms", f"{WRONG}:another_the_second_time", "--sizes", "8,64K", "--pairs", "2")
    assert result.rc == 70 and len(result.error_lines) == 1, result.err
    assert re.search("another_the_second_time of 65536 bytes of float32 gave a wrong sum: element 16383 of 16384 is",
                     result.error_lines[0])
    assert " 8 B  float32" in result.out, "the small sums are right"


def test_an_own_algorithm_is_proved_at_the_lengths_that_are_measured(tmp_path: Path) -> None:
    result = bench(2, tmp_path, "--algorithms", f"{WRONG}:loses_a_part", "--sizes", "8,64K", "--pairs", "2")
    assert result.rc == 78 and len(result.error_lines) == 1, result.err
    assert re.search(r'E_SCHEDULE .*all-reduce ".*wrong.py:loses_a_part" with n=2, length=16384: rank 0 of 2 ends with the sum '
                     r"of \[\(0, 0\), \(1, 0\)\] in element 16383; it should be element 16383 of each rank once$",
                     result.error_lines[0])
    assert " 8 B  float32" in result.out, "the small sums are right"


@pytest.mark.slow
def test_a_signal_that_asks_to_save_and_stop_does_not_end_what_has_nothing_to_save(tmp_path: Path) -> None:
    job = launch(2, "-m", "mpitrain", "bench", "allreduce", "--sizes", "8", "--algorithms", "ring,tree", "--pairs", "30",
                 "--json", "r.json", cwd=tmp_path)
    job.wait_for("times faster")                              # the head of the table
    job.signal(signal.SIGUSR1)                                # mpirun passes it on
    result = job.finish(120)
    assert result.rc == 0 and result.error_lines == [] and result.out.count(" 8 B  float32") == 2, result.err


def test_one_rank_says_that_nothing_is_exchanged(tmp_path: Path) -> None:
    result = bench(1, tmp_path, "--json", "r.json")
    assert result.rc == 0 and "one rank has nothing to exchange" in result.out
    assert (tmp_path / "r.json").read_text() == ""


@pytest.mark.parametrize(("arguments", "rc", "message"), [
    (["--sizes", "8,many"], 64, 'E_USAGE .*found "many"'),
    (["--dtypes", "int3"], 64, "E_USAGE .*--dtypes knows no"),
    (["--algorithms", "rinf"], 64, "E_USAGE .*did you mean .ring."),
    (["--algorithms", "nowhere:f"], 78, "E_CONFIG .*no module nowhere"),
    (["--algorithms", "mpi", "--wire", "bfloat16"], 64, "E_USAGE .*--algorithms with --wire bfloat16 knows no .mpi."),
    (["--wire", "bf16"], 64, "E_USAGE .*--wire knows no .bf16."),
    (["--wire", "float16", "--dtypes", "float32,float64"], 64, "E_USAGE .*--wire float16 is for arrays of float32, found"),
    (["--pairs", "0"], 64, "E_USAGE .*--pairs must be at least 1"),
    (["--pairs", "x"], 64, "E_USAGE .*--pairs"),
    (["--sizes", "12", "--dtypes", "float64"], 64, "E_USAGE .*no whole number of float64"),
    (["--speed"], 64, "E_USAGE .*unknown argument --speed"),
    (["--json", "no/such/folder.json"], 66, "E_MISSING .*No such file"),
    (["--json", "."], 64, "E_USAGE .*--json takes a file to write, found the folder [.]"),
    (["--json", "/dev/full"], 74, 'E_IO .*file="/dev/full": No space left on device'),
])
def test_a_mistake_is_one_line_on_all_ranks(arguments: list[str], rc: int, message: str, tmp_path: Path) -> None:
    result = bench(2, tmp_path, *arguments)
    assert result.rc == rc and len(result.error_lines) == 1, result.err
    assert re.search(message, result.error_lines[0]), result.error_lines
