"""The test harness itself: a hung test ends with every rank's stack, and nothing a job started is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launch import ROOT, HangError, Result, clean_environment, launch, mpirun
from psutil import STATUS_ZOMBIE, NoSuchProcess, Process

pytestmark = pytest.mark.alone

UNDER_PYTEST = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "MPITRAIN_TEST_LIMIT": "2"}
HANG = """
import threading

def stuck_here():
    threading.Event().wait()

def waits_for_the_other(comm):
    comm.Barrier()

def test_that_hangs_on_one_rank(comm):
    stuck_here() if comm.rank == 1 else waits_for_the_other(comm)
"""
FAIL = """
def test_that_fails_on_one_rank(comm):
    assert comm.rank != 1, "planted"
    comm.Barrier()
"""


def run_tests(folder: Path, text: str, n: int = 3) -> Result:
    file = folder / "planted_mpi.py"
    file.write_text(text)
    return mpirun(n, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", folder, file,
                  timeout=30, env=UNDER_PYTEST)


def test_the_watchdog_ends_a_hung_test_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    result = run_tests(tmp_path, HANG)
    assert result.rc != 0 and result.seconds < 15
    assert "test_that_hangs_on_one_rank still runs after 2 s" in result.err
    assert result.err.count("in stuck_here") >= 1 and result.err.count("in waits_for_the_other") >= 2, result.err


def test_a_test_that_fails_on_one_rank_ends_the_others_too(tmp_path: Path) -> None:
    result = run_tests(tmp_path, FAIL)
    assert result.rc != 0 and result.seconds < 15
    assert "[rank 1/3]" in result.err and "planted" in result.err


def test_a_job_past_its_deadline_is_killed_and_shows_its_stacks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, threading\n"
                       "def stuck_here():\n"
                       "    rank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']\n"
                       "    print(f'rank {rank} is there\\n', end='', flush=True)\n"
                       "    threading.Event().wait()\n"
                       "stuck_here()\n")
    job = launch(2, program)
    job.wait_for("rank 0 is there")
    job.wait_for("rank 1 is there")
    with pytest.raises(HangError) as caught:
        job.finish(timeout=0)
    assert str(caught.value).count("in stuck_here") == 2


def test_a_process_that_outlives_the_job_is_found_and_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import subprocess\n"
                       "child = subprocess.Popen(['sleep', '600'], start_new_session=True,\n"
                       "                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
                       "print('child', child.pid)\n")
    with pytest.raises(AssertionError, match="outlived mpirun") as caught:
        mpirun(1, program, timeout=20)
    pid = int(str(caught.value).split("child ")[1].split()[0])
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Process(pid).status() != STATUS_ZOMBIE
    except NoSuchProcess:
        return False


def test_what_an_outer_launcher_left_does_not_reach_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "7")
    monkeypatch.setenv("PMIX_RANK", "3")
    env = clean_environment()
    assert "OMPI_COMM_WORLD_SIZE" not in env and "PMIX_RANK" not in env
    assert env["OMPI_ALLOW_RUN_AS_ROOT"] == "1" and env["OMP_NUM_THREADS"] == "1"
