"""Shared memory that loses a rank: nobody waits beyond five seconds, the lost rank is named, and a slow one is waited for."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from launch import POLL, Result, launch, mpirun, tagged

FAULTS = Path(__file__).with_name("shared_faults.py")
LIMIT = 5.0                                       # seconds from the failure to the end of mpirun
ULFM = ("--with-ft", "ulfm")                      # with it the launcher leaves the other ranks alone
ONLY_OPEN_MPI = pytest.mark.skipif("not __import__('launch').is_open_mpi()", reason="needs Open MPI: its mpirun --with-ft ulfm")
ENGINES = [(), pytest.param(("--polling",), marks=pytest.mark.slow)]


def run(name: str, culprit: int, n: int, *args: str) -> Result:
    return mpirun(n, FAULTS, name, str(culprit), *args, timeout=60)


def seconds_after_failure(result: Result, ended: float | None = None) -> float:
    return (ended or result.ended) - min(map(float, re.findall(r"failed at (\S+)", result.out)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.promise("A2")
def test_a_killed_rank_ends_the_job(engine: tuple[str, ...]) -> None:
    result = run("killed", 1, 3, *engine)
    assert result.rc != 0 and seconds_after_failure(result) < LIMIT


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "n", "culprit"), [("killed", 2, 0), ("killed_inside", 3, 1),
                                                    *(pytest.param(*more, marks=pytest.mark.slow)
                                                      for more in (("killed", 4, 3), ("killed_beside_messages", 2, 1)))])
@ONLY_OPEN_MPI
@pytest.mark.promise("A2")
def test_a_rank_killed_under_ulfm_leaves_nobody_waiting(name: str, n: int, culprit: int, engine: tuple[str, ...]) -> None:
    job = launch(n, FAULTS, name, str(culprit), *engine, mpi_args=ULFM)
    job.process.wait(60)
    deadline = time.monotonic() + LIMIT
    while tagged(job.tag) and time.monotonic() < deadline:    # this launcher may end before the ranks do
        time.sleep(POLL)
    ended = time.monotonic()
    result = job.finish()
    assert seconds_after_failure(result, ended) < LIMIT, result.err
    assert result.rc == 75
    assert len(result.error_lines) == 1, result.err
    if name != "killed_beside_messages":                      # there MPI may see it first
        what = r"allreduce float32\[262144\] gradient at byte 0 of arena 0"
        assert re.fullmatch(rf'mpitrain: E_PEER rank=\d/{n} host=\S+: {what} on channel "test": '
                            rf'rank {culprit} on this host has ended; see its own output for the cause, then '
                            rf"start again with --resume", result.error_lines[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.promise("A1")
def test_an_exception_on_one_rank_ends_the_others_that_wait(engine: tuple[str, ...]) -> None:
    result = run("raises", 1, 3, *engine)
    assert result.rc == 70 and seconds_after_failure(result) < LIMIT
    assert len(result.error_lines) == 1 and "RuntimeError" in result.error_lines[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_stands_still_is_waited_for(engine: tuple[str, ...]) -> None:
    result = run("stopped", 1, 3, *engine)
    assert result.rc == 0 and result.error_lines == [], result.err


def test_a_signal_reaches_a_rank_that_sleeps() -> None:
    result = run("interrupted", 1, 2)
    assert result.rc == 130 and seconds_after_failure(result) < LIMIT, result.err


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.promise("A6")
def test_buckets_in_swapped_order_are_told_before_a_value_is_used(engine: tuple[str, ...]) -> None:
    result = run("swapped", 1, 3, *engine)
    assert result.rc == 76 and seconds_after_failure(result) < LIMIT, result.err
    bucket = r"allreduce float32\[131072\] bucket \d at byte \d+ of arena 0"
    assert re.fullmatch(rf'mpitrain: E_DESYNC rank=\d/3 host=\S+: channel "test": rank \d is at shared collective 0, {bucket}; '
                        rf"rank \d is at shared collective 0, {bucket}; every rank must start .*", result.error_lines[0])
