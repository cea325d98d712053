"""The watcher's own means: its descriptors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import clean_environment

from mpitrain.comm.watch.memory import Memory
from mpitrain.comm.watch.processes import JOB_VARIABLES, RANK_VARIABLES, siblings
from mpitrain.comm.watch.words import LIBRARY, has_checkpoint, place_in

BEGIN = """if True:
    import os, resource, sys
    from mpitrain.comm.watch.watcher import Watcher
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, most) if hard > 0 else most))
    orders, ours = os.pipe()
    os.dup2(orders, 0)
    pipe, record = os.pipe()[1], os.memfd_create("record")
    os.ftruncate(record, 4096)
    watcher = Watcher(60.0, 60.0, True, 0, 1, False)

    def begin_run(*ranks):
        lines = [f"rank {rank} {os.getpid()} {pipe} {record} {record}" for rank in ranks]
        os.write(ours, "\\n".join([f"run {len(ranks)} ", *lines, ""]).encode())
        assert watcher.take_orders() and len(watcher.ranks) + len(watcher.unseen) == len(ranks)
"""
MANY = BEGIN + """
    begin_run(0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        begin_run(0)
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors of former runs are open"
    for _ in range(1100):
        os.dup(0)
    begin_run(0, 1)
    assert watcher.ranks[1].end > 1024
    begin_run(0, 1)
    os.close(ours)
    assert not watcher.take_orders()
"""


def test_the_place_of_a_stall_is_never_in_the_thread_that_answers_the_watcher() -> None:
    pulse = 'Thread 0x2 (most recent call first):\n  File "/x/mpitrain/comm/watch/pulse.py", line 179 in _answer\n' \
            '  File "/x/mpitrain/comm/watch/pulse.py", line 160 in _listen\n' \
            '  File "/x/threading.py", line 982 in run\n'
    own = 'Thread 0x3 (most recent call first):\n  File "/home/me/own.py", line 5 in tidy\n'
    idle = f'Thread 0x1 (most recent call first):\n  File "{LIBRARY}/threading.py", line 1583 in _shutdown\n'
    assert place_in("\n".join([pulse, idle]), "finish") == ""
    assert place_in("\n".join([own, pulse, idle]), "finish") == " in tidy at own.py:5"


def test_a_lost_rank_is_told_to_go_on_only_from_a_checkpoint_and_of_a_limit_that_it_nears(tmp_path: Path) -> None:
    assert not has_checkpoint("") and not has_checkpoint(str(tmp_path))      # `evaluate` has no run folder
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert has_checkpoint(str(tmp_path))
    limited = [sys.executable, "-c", "import resource; "
               "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, -1)); print(flush=True); input()"]
    with subprocess.Popen(limited, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        memory = Memory(process.pid)
        memory.look()
        assert memory.size > 0 and memory.narrow() == ""
        memory.size = 900 << 20
        assert "1024 MiB (ulimit -v)" in memory.narrow()
        process.communicate()
    assert Memory(os.getpid()).narrow() == ""


def test_the_watcher_closes_what_former_runs_had_and_looks_at_more_descriptors_than_select_takes() -> None:
    assert program(MANY, 4096) == ""


def program(text: str, files: int) -> str:
    """What it says in a process that may open so many files."""
    command = [sys.executable, "-c", text, str(files)]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


LOOK = BEGIN + """
    begin_run(*range(100))
    watcher.look()
    watcher.look()
    print(len(watcher.ranks), file=sys.stderr)
"""


@pytest.mark.promise("A4")
@pytest.mark.parametrize(("files", "said"), [
    (1024, "100\n"),
    (132, r"warning: 75 of 100 ranks on \S+ are not watched, rank 25 first: the limit of open files is 132; "
          r"raise it \(ulimit -Hn\) to 432 before the job starts\n25\n")])
def test_ranks_for_which_the_soft_limit_of_files_is_too_low_are_watched_and_others_are_told(files: int, said: str) -> None:
    assert re.fullmatch(said, program(LOOK, files).lstrip())


LATE = BEGIN + """
    watcher.not_started = lambda seconds: print("not started", file=sys.stderr)

    def told(order):
        os.write(ours, order.encode())
        watcher.take_orders()
        watcher.start = 1e-9
        watcher.look()
        print(order.split("\\n")[0], file=sys.stderr)

    told("start opens\\n")
    told("start done\\n")
    told("start opens\\n")
    told(f"run 2 \\nrank 0 {os.getpid()} 900 900 900\\n")
    told("start opens\\n")
    watcher.period = 0.0
    assert watcher.take_orders()
    watcher.look()
"""
ENDED = BEGIN + """
    os.write(ours, f"run 1 \\nrank 0 {os.getpid()} 900 900 900\\n".encode())
    os.close(ours)
    watcher.run()
"""


def test_nothing_is_said_of_ranks_that_cannot_be_looked_at_because_the_job_is_over() -> None:
    assert program(ENDED, 1024) == ""


@pytest.mark.promise("A4")
def test_mpi_has_started_once_a_rank_has_said_so() -> None:
    """A program may open its run late; and a watcher that can see no rank must not take this for a start that fails."""
    said = program(LATE, 1024).split("\n")
    assert said[:4] == ["not started", "start opens", "start done", "not started"] and said[4] == "start opens"
    later = [line for line in said[5:] if line]
    assert later[:2] == ["run 2 ", "start opens"] and len(later) == 3 and "nobody watches" in later[2]


@pytest.mark.promise("A4")
def test_only_processes_of_the_job_are_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher, or a batch script, has started beside them is left alone, and so are children of who adopted them."""
    for name in (*RANK_VARIABLES, *JOB_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    kinds = [{}, {"PMIX_RANK": "0", "PMIX_NAMESPACE": "a"}, {"PMIX_RANK": "1", "PMIX_NAMESPACE": "a"},
             {"PMIX_RANK": "1", "PMIX_NAMESPACE": "b"}, {"PMIX_RANK": "", "PMIX_NAMESPACE": "a"}, {"PMIX_NAMESPACE": "a"}]
    started = [subprocess.Popen(["sleep", "60"], env=clean_environment() | kind) for kind in kinds]
    try:
        assert siblings(started[1].pid, os.getpid()) == []                   # no launcher has started this process
        monkeypatch.setenv("PMIX_RANK", "0")
        monkeypatch.setenv("PMIX_NAMESPACE", "a")
        assert sorted(siblings(started[1].pid, os.getpid())) == [(0, started[1].pid), (1, started[2].pid)]
        assert siblings(started[1].pid, 1) == [] == siblings(os.getpid(), os.getpid())       # another parent than at first
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_the_watcher_starts_with_little_of_the_standard_library() -> None:
    """Each job starts one on every node, beside ranks that start too."""
    code = "import sys; from mpitrain.comm.watch import watcher; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=clean_environment(), check=True)
    assert not {"collections", "contextlib", "functools", "typing", "re", "dataclasses"} & set(told.stdout.split())
