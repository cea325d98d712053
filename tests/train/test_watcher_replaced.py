"""A watcher that is gone is replaced, and the next one names a rank that stands still."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from launch import Job, Result, is_watcher, send, tagged, wait_until
from runs import record
from test_stalls import ONLY_OPEN_MPI, ONLY_WITH_C, start

from mpitrain.comm.watch.processes import PARENT, RANK_VARIABLES, stat


def process_of(job: Job, rank: int) -> int:
    """The process of a rank."""
    return next(pid for pid in job.ranks() for name in RANK_VARIABLES
                if f"{name}={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def signal_watcher(job: Job, number: int) -> None:
    watchers = list(filter(is_watcher, tagged(job.tag)))
    assert len(watchers) == 1
    send(watchers[0], number)


def replaced(result: Result, why: str) -> None:
    """One line says that another watcher took the place of the first one."""
    said = re.findall(r"^warning: the watcher of \S+ (.*): another one takes its place$", result.err, re.MULTILINE)
    assert len(said) == 1 and re.fullmatch(why, said[0]), result.err


@pytest.mark.promise("A4")
@pytest.mark.parametrize(("number", "why"), [(signal.SIGKILL, "has ended"), pytest.param(
    signal.SIGSTOP, "has said nothing for 4 s or more", marks=pytest.mark.slow)])
def test_a_watcher_that_is_killed_or_stopped_is_replaced_by_one_that_names_a_stopped_rank(tmp_path: Path, number: int,
                                                                                          why: str) -> None:
    job = start(tmp_path, 2, "none", "forward", 1, "train.steps=100000")
    job.wait_for("step 4/")
    signal_watcher(job, number)
    send(process_of(job, 1), signal.SIGSTOP)
    result = job.finish(timeout=30)
    assert result.rc == 75 and len(result.error_lines) == 1, result.err
    assert re.match(r"mpitrain: E_STALL rank=1/2 host=\S+ step=\d+ phase=\w+: no progress for \d+ s .*; rank 0 waits for it",
                    result.error_lines[0]), result.err
    replaced(result, why)


@pytest.mark.promise("A4")
def test_a_run_whose_watcher_is_killed_goes_on(tmp_path: Path) -> None:
    job = start(tmp_path, 2, "slow", "forward", 1, "train.steps=150")
    job.wait_for("failed at")
    signal_watcher(job, signal.SIGKILL)
    result = job.finish()
    assert result.rc == 0 and result.error_lines == [] and record(tmp_path / "run")["status"] == "done"
    replaced(result, "has ended")


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.promise("A4")
def test_where_the_first_rank_cannot_replace_the_watcher_the_next_one_does(tmp_path: Path) -> None:
    job = start(tmp_path, 3, "none", "forward", 1, "train.steps=100000")
    job.wait_for("step 4/")
    send(process_of(job, 0), signal.SIGSTOP)
    signal_watcher(job, signal.SIGKILL)
    result = job.finish(timeout=30)
    assert result.rc == 75 and len(result.error_lines) == 1 and "E_STALL rank=0/3 " in result.error_lines[0], result.err
    replaced(result, "has said nothing for 6 s or more")


@ONLY_WITH_C
@ONLY_OPEN_MPI
@pytest.mark.promise("A4")
def test_a_rank_whose_watcher_dies_before_mpi_has_started_ends_by_itself(tmp_path: Path) -> None:
    job = start(tmp_path, 2, "kill", "mpi", 1, "train.start_s=1", mpi_args=("--with-ft", "ulfm"))
    wait_until(lambda: any(map(is_watcher, tagged(job.tag))))
    signal_watcher(job, signal.SIGKILL)
    result = job.finish(timeout=30)
    assert result.rc == 75 and len(result.error_lines) == 1, result.err
    assert re.match(r"mpitrain: E_STALL rank=0/2 host=\S+ phase=start: MPI has not started for ", result.error_lines[0])


@ONLY_OPEN_MPI
@pytest.mark.promise("A2", "A4")
def test_the_ranks_left_without_the_first_one_of_their_node_are_watched(tmp_path: Path) -> None:
    job = start(tmp_path, 3, "kill", "forward", 0, "train.steps=100000", "train.on_lost=go_on", mpi_args=("--with-ft", "ulfm"))
    job.wait_for("left go on")
    left = job.ranks()
    wait_until(lambda: any(is_watcher(pid) and int(stat(pid)[PARENT] or 0) in left for pid in tagged(job.tag)))
    send(process_of(job, 2), signal.SIGSTOP)
    result = job.finish(timeout=30)
    assert result.rc in (75, 137) and len(result.error_lines) == 1, result.err
    assert re.match(r"mpitrain: E_STALL rank=1/2 ", result.error_lines[0]), result.err
    assert "nobody watches" not in result.err + result.out
