"""A rank that stands still is named by the watcher within `train.stall_s` and a moment, and the job ends with 75, or goes on."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from launch import GRACE, POLL, Job, Result, is_watcher, launch, send, tagged
from runs import SMALL, record, write

from mpitrain.train.observers.stragglers import straggler

STALLS = Path(__file__).with_name("stalls.py")
LIMIT = 5.0                                       # seconds beyond stall_s until the end of mpirun
ONLY_OPEN_MPI = pytest.mark.skipif("not __import__('launch').is_open_mpi()", reason="needs Open MPI: its mpirun --with-ft ulfm")
ONLY_WITH_C = pytest.mark.skipif("__import__('os').environ.get('MPITRAIN_KERNELS', 'c') != 'c'", reason="needs native/leave.c")
START = 8.0                                       # a start takes 1 to 6 seconds on a busy machine
PHASES = ("start", "load", "forward", "backward", "exchange", "update", "evaluation", "save", "finish")
STILL = ("stop", "hold", "loop", "mpi", "read")
ENDED = {"kill": 137, "segfault": 139, "abort": 134, "exception": 70}
EVERY = list(itertools.product([*STILL, *ENDED, "none"], PHASES, (2, 3, 4)))
CASES = EVERY if os.environ.get("MPITRAIN_EVERY_FAULT") else EVERY[::10]      # each kind in three phases, each phase on 2, 3, 4


def start(tmp_path: Path, n: int, kind: str, phase: str, rank: int, *arguments: str, seconds: float = 2.0,
          env: dict[str, str] | None = None, mpi_args: tuple[str, ...] = ()) -> Job:
    return launch(n, STALLS, kind, phase, str(rank), write(tmp_path, SMALL), "run.out=run", "train.steps=8", "log.every=4",
                  f"train.stall_s={seconds}", f"train.start_s={START}", *arguments, cwd=tmp_path, env=env,
                  mpi_args=mpi_args)


def run(tmp_path: Path, n: int, kind: str, phase: str, rank: int, *arguments: str, seconds: float = 2.0) -> Result:
    return start(tmp_path, n, kind, phase, rank, *arguments, seconds=seconds).finish(timeout=60)


def named(result: Result, rank: int, n: int, phase: str, *, seconds: float = 2.0) -> str:
    """The one line of a stall on `rank`; what stands after the place."""
    assert result.rc == 75, result.err
    assert len(result.error_lines) == 1, result.err
    line = result.error_lines[0]
    found = re.fullmatch(rf"mpitrain: E_STALL rank={rank}/{n} host=\S+ step=\d+ phase={phase}: no progress for \d+ s"
                         r"(?: in \w+ at \w+\.py:\d+)? (.*)", line)
    assert found and len(line) <= 500 and line.isascii() and line.isprintable(), line
    failed = float(re.findall(r"failed at (\S+)", result.out)[0])
    assert result.ended - failed < seconds + LIMIT
    return found[1]


def wait_for_err(job: Job, text: str, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while text not in job.err:
        assert job.process.poll() is None and time.monotonic() < deadline, f"no {text!r} in\n{job.out}\n{job.err}"
        time.sleep(POLL)


@pytest.mark.promise("A4")
def test_a_run_on_which_nothing_happens_is_left_alone(tmp_path: Path) -> None:
    result = run(tmp_path, 2, "none", "forward", 1)
    assert result.rc == 0 and "warning" not in result.err and not list((tmp_path / "run").glob("errors/*"))


@pytest.mark.promise("A4")
def test_a_stopped_rank_is_named_with_its_place_and_who_waits_for_it(tmp_path: Path) -> None:
    result = run(tmp_path, 3, "stop", "forward", 1)
    rest = named(result, 1, 3, "forward")
    assert " step=5 " in result.err and " in stop at stalls.py:" in result.err
    assert re.match(r"\(stopped by a signal\); ranks 0, 2 wait for it in allreduce .* on channel \S+; stacks of all ranks:", rest)
    for rank in range(3):
        stack = tmp_path / f"run/errors/rank-{rank}.stack.txt"
        assert "stalls.py" in stack.read_text() and stack.stat().st_mode & 0o777 == 0o600
    assert "mpitrain/comm/messages/" in (tmp_path / "run/errors/rank-0.stack.txt").read_text()


@pytest.mark.promise("A4")
def test_a_rank_that_holds_the_interpreter_in_c_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, 2, "hold", "backward", 0)
    assert "with the interpreter's lock held" in named(result, 0, 2, "backward")
    assert " in hold_the_interpreter at stalls.py:" in result.err


@pytest.mark.promise("A4")
@pytest.mark.parametrize("kind", ["stop", pytest.param("hold", marks=pytest.mark.slow)])
def test_without_a_compiler_the_exit_code_is_that_of_the_ranks_that_can_still_run_python(tmp_path: Path, kind: str) -> None:
    result = start(tmp_path, 2, kind, "forward", 1, env={"PATH": "/nonexistent", "CC": ""}).finish()
    named(result, 1, 2, "forward")


@pytest.mark.promise("C9")
def test_a_read_that_does_not_return_is_named_with_the_reading_threads_line(tmp_path: Path) -> None:
    result = run(tmp_path, 2, "read", "load", 1)
    named(result, 1, 2, "load")
    assert " in read_for_ever at stalls.py:" in result.err


@pytest.mark.promise("A4")
def test_an_endless_loop_of_a_run_of_one_rank_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, 1, "loop", "update", 0)
    named(result, 0, 1, "(exchange|update)")
    assert " in loop at stalls.py:" in result.err


@ONLY_WITH_C
@pytest.mark.promise("A4")
def test_a_rank_that_never_comes_to_the_start_of_mpi_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, 2, "stop", "mpi", 1, "train.start_s=1")
    assert result.rc == 75 and len(result.error_lines) == 1, result.err
    assert re.fullmatch(r"mpitrain: E_STALL rank=1/2 host=\S+ phase=start: MPI has not started for \d+ s \(stopped by a "
                        r"signal\); see .*", result.error_lines[0])


@ONLY_WITH_C
@ONLY_OPEN_MPI
@pytest.mark.promise("A2", "A4")
@pytest.mark.parametrize(("n", "kind", "rank", "says"), [(2, "kill", 0, 1), (2, "kill", 1, 0), (3, "leave", 0, "[12]")])
def test_a_rank_that_dies_before_mpi_starts_ends_the_job_under_ulfm(tmp_path: Path, n: int, kind: str, rank: int,
                                                                    says: int | str) -> None:
    result = start(tmp_path, n, kind, "mpi", rank, "train.start_s=0.5", mpi_args=("--with-ft", "ulfm")).finish(timeout=30)
    assert result.rc == 75 and len(result.error_lines) == 1, result.err
    why = r" \(other ranks are missing, .*\)" if rank else ", and nobody watches: the first rank of this node, or .* ended"
    assert re.fullmatch(rf"mpitrain: E_STALL rank={says}/{n} host=\S+ phase=start: MPI has not started for \d s{why}; see that "
                        "all ranks start, or raise train.start_s", result.error_lines[0])


@pytest.mark.promise("A4")
def test_once_mpi_has_started_a_rank_has_no_alarm(tmp_path: Path) -> None:
    result = run(tmp_path, 2, "timer", "forward", 1)
    assert result.rc == 0 and "timer 0.0 0.0\n" in result.out, result.err


@pytest.mark.promise("A4")
def test_with_a_warning_alone_a_stopped_rank_may_go_on(tmp_path: Path) -> None:
    job = start(tmp_path, 2, "stop", "forward", 1, "train.stall=warn")
    wait_for_err(job, "warning: E_STALL rank=1/2")
    for pid in job.ranks():
        send(pid, signal.SIGCONT)
    result = job.finish()
    assert result.rc == 0 and result.error_lines == []
    assert re.search(r"^warning: rank 1 on \S+ stood still for \d+ s in forward of step 5 and goes on", result.err, re.MULTILINE)
    assert result.err.count("E_STALL") == 1 and record(tmp_path / "run")["status"] == "done"


@pytest.mark.alone
@pytest.mark.promise("E4")
@pytest.mark.parametrize("with_watcher", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_job_that_is_stopped_as_a_whole_goes_on_and_nothing_is_said(tmp_path: Path, with_watcher: bool) -> None:
    job = start(tmp_path, 2, "none", "forward", 1, "train.steps=500", "train.eval_every=500")
    job.wait_for("step 8/500")
    stopped = [pid for pid in tagged(job.tag) if pid != job.process.pid and (with_watcher or not is_watcher(pid))]
    for pid in stopped:
        send(pid, signal.SIGSTOP)
    wait_longer_than(3.0)                         # it is the passing of time that is tested
    for pid in stopped:
        send(pid, signal.SIGCONT)
    job.wait_for("step 500/500")
    result = job.finish()
    assert result.rc == 0 and "E_STALL" not in result.err and "stood still" not in result.err


def wait_longer_than(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(POLL)


@pytest.mark.promise("A11")
def test_the_watcher_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = start(tmp_path, 2, "loop", "forward", 1, seconds=600)
    job.wait_for("failed at")
    assert any(map(is_watcher, tagged(job.tag)))
    job.signal(signal.SIGKILL)
    job.process.wait(GRACE)
    for pid in job.ranks():                       # the one in the loop does not look for its launcher
        send(pid, signal.SIGKILL)
    assert job.finish().orphans == ()


def test_nobody_watches_where_that_is_switched_off(tmp_path: Path) -> None:
    job = start(tmp_path, 2, "read", "forward", 1, seconds=0)
    job.wait_for("failed at")
    assert not any(map(is_watcher, tagged(job.tag)))
    for pid in job.ranks():
        os.kill(pid, signal.SIGKILL)
    job.finish()


@pytest.mark.alone
@pytest.mark.promise("A9")
@pytest.mark.parametrize(("phase", "why"), [("forward", "to compute"), ("load", "to read its data")])
def test_a_slow_rank_is_named_with_what_it_is_slow_at_and_how_long_others_wait(tmp_path: Path, phase: str, why: str) -> None:
    result = run(tmp_path, 3, "slow", phase, 1, "train.steps=60", "log.every=15")
    assert result.rc == 0, result.err
    said = re.findall(r"^rank (\d) \(\S+\) takes ([\d.]+) times as long as the other ranks, mostly (.*): they wait (\d+)% "
                      "of a step for it$", result.out, re.MULTILINE)
    assert [(rank, of) for rank, _, of, _ in said] == [("1", why)] and float(said[0][1]) > 1.25 and int(said[0][3]) >= 20


@pytest.mark.promise("A9")
def test_ranks_that_take_about_as_long_are_not_told_of() -> None:
    hosts = ["a", "a", "b"]
    assert straggler(np.array([1.0, 1.1, 1.2]), np.zeros(3), hosts) is None
    assert straggler(np.array([1.0, 1.0, 3.0]), np.zeros(3), hosts) == \
        "rank 2 (b) takes 3.0 times as long as the other ranks, mostly to compute: they wait 67% of a step for it"
    assert straggler(np.array([0.001, -0.0004]), np.zeros(2), hosts) is None
    assert "to read its data" in (straggler(np.array([2.0, 1.0]), np.array([0.8, 0.1]), hosts) or "")


@pytest.mark.promise("A1")
@pytest.mark.parametrize("phase", ["start", "backward"])
def test_an_exception_is_told_with_its_step_and_phase(tmp_path: Path, phase: str) -> None:
    ended(run(tmp_path, 2, "exception", phase, 1), "exception", 1, 2, phase)


def ended(result: Result, kind: str, rank: int, n: int, phase: str) -> None:
    """The rank has ended so in that phase, and the job with it."""
    assert result.rc == ENDED[kind], result.err
    assert result.ended - float(re.findall(r"failed at (\S+)", result.out)[0]) < LIMIT
    if kind == "exception":
        step = {"load": 4, "evaluation": 8, "save": 8, "finish": 8}.get(phase, 5)      # a trial has read one batch before
        where = f"phase={phase}" if phase == "start" else f"step={step} phase={phase}"
        line = rf"mpitrain: E_USER rank={rank}/{n} host=\S+ {where}: ValueError at stalls.py:.* on purpose"
        assert len(result.error_lines) == 1 and re.fullmatch(line, result.error_lines[0]), result.err
    else:
        line = rf"mpitrain: E_PEER rank={rank}/{n} host=\S+ step=\d+ phase={phase}: its process has ended without a word: .*"
        assert len(result.error_lines) == 1 and re.fullmatch(line, result.error_lines[0]), result.err


@pytest.mark.promise("A2")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_told_with_its_step_and_phase(tmp_path: Path, rank: int) -> None:
    ended(run(tmp_path, 2, "kill", "backward", rank), "kill", rank, 2, "backward")


@pytest.mark.slow
@pytest.mark.promise("A4")
def test_a_program_that_does_not_end_after_its_run_is_named_while_other_ranks_wait_in_mpis_end(tmp_path: Path) -> None:
    named(run(tmp_path, 2, "lingers", "backward", 1), 1, 2, "finish", seconds=5.0)
    assert "pulse.py" not in (tmp_path / "run/errors/rank-1.stack.txt").read_text().splitlines()[0]


@ONLY_WITH_C
@pytest.mark.promise("A1", "A2")
@pytest.mark.parametrize("phase", ["start", "backward"])
def test_a_library_that_calls_exit_does_not_choose_the_exit_code_of_the_job(tmp_path: Path, phase: str) -> None:
    result = run(tmp_path, 2, "exit", phase, 1)
    assert result.rc == 70, result.err
    line = r"mpitrain: E_EXIT rank=1/2 host=\S+: a library in C has ended the program by its own call of exit\(\); what .*"
    assert len(result.error_lines) == 1 and re.fullmatch(line, result.error_lines[0]), result.err


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.promise("A1", "A2", "A4", "C9")
@pytest.mark.parametrize(("kind", "phase", "n"), CASES)
def test_every_fault_in_every_phase(tmp_path: Path, kind: str, phase: str, n: int) -> None:
    rank, told = n - 1, "(exchange|update)" if phase == "update" else phase
    result = run(tmp_path, n, kind, phase, rank, seconds=20.0 if kind in ENDED else 2.0)
    if kind in STILL:
        named(result, rank, n, told, seconds=START if phase == "start" else 2.0)
    elif kind in ENDED:
        ended(result, kind, rank, n, told)
    else:
        assert result.rc == 0 and "failed at" in result.out and "E_STALL" not in result.err
