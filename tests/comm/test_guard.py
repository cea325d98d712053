"""A failure on any rank ends the job within five seconds, with one line and the right exit code, and leaves no process."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from launch import Result, clean_environment, is_mpich, is_open_mpi, launch, may_end_with_0, mpirun

FAULTS = Path(__file__).with_name("faults.py")
ONLY_OPEN_MPI = pytest.mark.skipif("not __import__('launch').is_open_mpi()", reason="needs Open MPI: its mpirun --with-ft ulfm")
NO_CODE = (0,) if may_end_with_0() else ()        # what the launcher may say where a rank has ended by itself
LIMIT = 5.0                                       # seconds from the first failure to the end of mpirun


def run(name: str, culprit: int, n: int = 2, **options: object) -> Result:
    return mpirun(n, FAULTS, name, str(culprit), timeout=40, **options)        # type: ignore[arg-type]


def seconds_after_failure(result: Result) -> float:
    return result.ended - min(map(float, re.findall(r"failed at (\S+)", result.out)))


def one_line(result: Result, rc: int | tuple[int, ...], pattern: str, limit: float = LIMIT) -> None:
    assert result.rc in (rc if isinstance(rc, tuple) else (rc,)), result.err
    assert len(result.error_lines) == 1, result.err
    line = result.error_lines[0]
    assert re.fullmatch(pattern, line), line
    assert len(line) <= 500 and line.isascii() and line.isprintable()
    assert seconds_after_failure(result) < limit


def test_without_a_fault_the_same_program_ends_well() -> None:
    result = run("fine", 0, n=3)
    assert result.rc == 0 and result.error_lines == []


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.promise("A1")
def test_bad_data_on_one_rank_while_the_others_wait(n: int, culprit: int) -> None:
    one_line(run("data", culprit, n), 65, rf'mpitrain: E_DATA rank={culprit}/{n} host=\S+ step=11 file="dig\\xc3\\xadts.h5" '
                                          r'dataset="y" row=7: label 12 is not below 10')


@pytest.mark.parametrize(("name", "rc", "message"), [
    ("bug", 70, r"E_USER rank=1/2 host=\S+: ZeroDivisionError at faults.py:\d+ in throw: division by zero"),
    ("in_barrier", 70, r"E_USER rank=1/2 host=\S+: RuntimeError at faults.py:\d+ in in_barrier: "
                       r"line one\\x0ampitrain: not a second line \\x1b\[31m"),
    ("memory", 71, r"E_MEMORY rank=1/2 host=\S+: out of memory at faults.py:\d+ in <lambda>: Unable to allocate .*; use a .*"),
    ("missing", 66, r'E_MISSING rank=1/2 host=\S+ file="/nonexistent/x.h5": No such file or directory'),
    ("interrupt", 130, r"E_INTERRUPT rank=1/2 host=\S+: interrupted"),
    ("exit", 70, r"E_EXIT rank=1/2 host=\S+: the program ended by sys.exit\(85\) at faults.py:\d+ in <lambda> in the midst .*"),
    ("exit_0", 70, r"E_EXIT rank=1/2 host=\S+: the program ended by sys.exit\(0\) at .*"),
    ("exit_text", 70, r"E_EXIT rank=1/2 host=\S+: the program ended by sys.exit\('enough'\) at .*"),
    ("return_3", 3, r"E_EXIT rank=1/2 host=\S+: the program ended by returning 3 while .*"),
    ("thread", 70, r"E_USER rank=1/2 host=\S+: ValueError at faults.py:\d+ in throw: from a thread"),
    ("before_mpi", 65, r"E_DATA rank=1/2 host=\S+: found before MPI started"),
])
@pytest.mark.promise("A1", "A3")
def test_one_rank_fails(name: str, rc: int, message: str) -> None:
    one_line(run(name, 1), rc, "mpitrain: " + message)


@pytest.mark.parametrize(("name", "rc", "message"), [
    ("no_files", 74, r"E_IO rank=1/2 host=\S+ file=.*: Too many open files; raise the limit on open files .*"),
    ("no_memory", 71, r"E_MEMORY rank=1/2 host=\S+: out of memory at faults.py:\d+ in leak: an allocation failed "
                        r"\(a process may have \d+ MiB: ulimit -v\); use a .*"),
    ("no_threads", 70, r"E_USER rank=1/2 host=\S+: ValueError at faults.py:\d+ in fail_without: no thread left"),
    ("no_text", 70, r"E_USER rank=1/2 host=\S+: Unprintable at faults.py:\d+ in throw: \(it cannot be printed: RuntimeError\)"),
    ("nothing_left", 70, r"E_BUG rank=1/2: ValueError, and then RuntimeError while saying so"),
])
@pytest.mark.promise("A3", "A12")
def test_a_rank_that_has_run_out_of_something_does_not_leave_the_others_waiting(name: str, rc: int, message: str) -> None:
    one_line(run(name, 1), rc, "mpitrain: " + message, limit=LIMIT + 2)      # the wait for a turn comes on top


@pytest.mark.promise("A1")
def test_a_lone_rank_does_not_end_a_run_with_a_code_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, FAULTS, "exit", "0"]
    found = subprocess.run(command, env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.returncode == 70 and re.match(r"mpitrain: E_EXIT rank=0/1 .* sys.exit\(85\) at faults.py:", found.stderr)


@ONLY_OPEN_MPI
@pytest.mark.promise("A2")
def test_the_last_rank_alive_under_ulfm_ends_with_its_own_code() -> None:
    job = launch(2, FAULTS, "lone_survivor", "1", mpi_args=("--with-ft", "ulfm"))
    result = job.finish(timeout=40)
    assert result.rc == 75, result.err
    assert len(result.error_lines) == 1 and re.search(r"E_PEER rank=0/2 .*: MPI reports MPI_ERR_PROC_FAILED.* .*",
                                                      result.error_lines[0])


@ONLY_OPEN_MPI
@pytest.mark.parametrize("n", [2, 3])                        # in C; by the interpreter of steps
@pytest.mark.promise("A2")
def test_who_waits_for_a_rank_killed_under_ulfm_names_the_collective(n: int) -> None:
    result = launch(n, FAULTS, "kill", str(n - 1), mpi_args=("--with-ft", "ulfm")).finish(timeout=40)
    assert result.rc == 75, result.err
    assert re.search(r'E_PEER rank=\d/\d .*: allreduce float64\[1000\] (endless|gradient) on channel "test": MPI reports '
                     r"MPI_ERR_(PROC_FAILED|IN_STATUS|REVOKED).*; another rank was probably lost", result.error_lines[0])


@pytest.mark.parametrize("name", ["wrong_config", "wrong_config_after_start"])
@pytest.mark.promise("A1")
def test_what_is_wrong_on_every_rank_is_said_once_by_rank_0(name: str) -> None:
    one_line(run(name, -1, n=4), 78, r"mpitrain: E_CONFIG rank=0/4 host=\S+: optimizer.lr=-1 must be positive")


@pytest.mark.parametrize("name", ["wrong_config", "wrong_config_after_start"])
@pytest.mark.promise("A1")
def test_what_should_be_wrong_everywhere_but_is_on_one_rank_ends_the_job_too(name: str) -> None:
    one_line(run(name, 2, n=3), 78, r"mpitrain: E_CONFIG rank=2/3 host=\S+: optimizer.lr=-1 must be positive")


def test_a_stop_on_request_is_said_once_with_its_code() -> None:
    one_line(run("stopped", -1, n=3), 85, r"mpitrain: E_STOPPED rank=0/3 .*: saved at step 10; start again with --resume")


@pytest.mark.promise("A1")
def test_ranks_that_fail_by_accident_together_print_one_line() -> None:
    one_line(run("together", -1, n=4), 70, r"mpitrain: E_USER rank=\d/4 .*: on every rank")


@pytest.mark.parametrize(("name", "one", "other"), [
    ("swapped", r"allreduce float64\[1000\] bucket 1", r"allreduce float64\[1000\] bucket 0"),
    ("swapped_in_thread", r"allreduce float64\[1000\] bucket 1", r"allreduce float64\[1000\] bucket 0"),
    ("dtype", r"allreduce float64\[8\] x", r"allreduce int64\[8\] x"),
    ("count", r"allreduce float64\[9\] x", r"allreduce float64\[8\] x"),
    ("skipped", r"allreduce float64\[1000\] endless", r"allreduce float64\[8\] x"),
    ("extra_barrier", r"allreduce int8\[1\] barrier", r"allreduce float64\[1000\] endless"),
    ("other_operation", r"broadcast from 0 float64\[8\] x", r"allreduce float64\[8\] x"),
    ("large_against_small", r"allreduce float64\[1000000\] x", r"allreduce float64\[1\] x"),
])
@pytest.mark.parametrize("n", [3, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.promise("A6")
def test_ranks_in_different_collectives_are_told_both_before_a_value_is_used(name: str, one: str, other: str, n: int) -> None:
    result = run(name, 1, n)
    number = "[23]" if name.startswith("swapped") else "2"              # with both of them in flight, either may be found first
    at = rf"rank \d is at collective {number}, ({one}|{other})"
    one_line(result, 76, rf'mpitrain: E_DESYNC rank=\d/{n} host=\S+: channel "test": {at}; {at}; every rank must .*')
    assert re.search(one, result.err) and re.search(other, result.err)
    assert "a wrong value was used" not in result.out


@pytest.mark.promise("A2")
def test_a_killed_rank_ends_the_job() -> None:
    result = run("kill", 1, n=3)
    assert result.rc in (137, 9, 255, *NO_CODE) and seconds_after_failure(result) < LIMIT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.promise("E2")
def test_a_signal_to_the_launcher_ends_the_job(number: int) -> None:
    job = launch(2, FAULTS, "sleep", "0")
    job.wait_for("ready")
    job.signal(number)
    result = job.finish(timeout=LIMIT)
    assert result.rc != 0 or NO_CODE


@pytest.mark.promise("A12")
def test_a_hang_in_the_failure_path_is_bounded() -> None:
    """Intel MPI's code for ranks that it has to kill is 255."""
    one_line(run("stuck_abort", 1), (70, *NO_CODE) if is_open_mpi() or is_mpich() else 255, "mpitrain: E_USER .*", limit=7)


@pytest.mark.promise("A12")
def test_a_closed_stderr_does_not_keep_the_job_alive() -> None:
    result = run("closed_stderr", 1)
    assert result.rc == 70 and seconds_after_failure(result) < LIMIT


@pytest.mark.promise("F7")
def test_the_traceback_goes_to_the_run_folder_for_the_owner_only(tmp_path: Path) -> None:
    result = run("with_run_folder", 1, env={"RUN_FOLDER": str(tmp_path)})
    one_line(result, 70, "mpitrain: E_USER .*")
    file = tmp_path / "errors" / "rank-1.json"
    record = json.loads(file.read_text())
    assert "Traceback" in record["traceback"] and record["line"] == result.error_lines[0]
    assert (record["code"], record["exit_code"], record["rank"], record["size"]) == ("E_USER", 70, 1, 2)
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert "Traceback" not in result.err


@pytest.mark.promise("A12")
def test_a_full_disk_is_one_line_also_where_the_record_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("disk_full", 1, env={"RUN_FOLDER": str(tmp_path / "file")})
    one_line(result, 74, r'mpitrain: E_IO rank=1/2 host=\S+ file="metrics.jsonl": No space left on device')
    assert "Traceback" not in result.err and "\n| " not in result.err


@pytest.mark.promise("A12")
def test_a_run_folder_that_cannot_be_written_sends_the_traceback_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("with_run_folder", 1, env={"RUN_FOLDER": str(tmp_path / "file")})
    one_line(result, 70, "mpitrain: E_USER .*")
    assert "| Traceback" in result.err


def test_the_traceback_goes_to_the_terminal_when_asked_for() -> None:
    result = mpirun(2, FAULTS, "bug", "1", "--traceback", timeout=40)
    one_line(result, 70, "mpitrain: E_USER .*")
    assert "| ZeroDivisionError: division by zero" in result.err
