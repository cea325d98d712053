"""The run folder on a file system without locks: a library that is loaded first makes flock fail in real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from c_library import compiled

from mpitrain.checkpoint import claim, store
from mpitrain.checkpoint.claim import Claim, Kernel
from mpitrain.checkpoint.run_folder import RunFolder
from mpitrain.errors import LostFolderError, OutputError, StorageError

ROOT = Path(__file__).resolve().parents[2]
NO_LOCKS = """
#include <errno.h>
int flock(int file, int operation) { errno = ENOLCK; return -1; }
"""
HOLD = """if True:
    import sys
    from mpitrain.checkpoint.run_folder import RunFolder
    from mpitrain.errors import OutputError
    print("ready", flush=True)
    input()
    try:
        run = RunFolder(sys.argv[1]).open(resume=True)
        print("held", flush=True)
    except OutputError as error:
        print(error.exit_code, error, flush=True)
    input()"""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    """Starts a process that waits to open the folder; all are killed at the end."""
    compiled(tmp_path, NO_LOCKS)
    running: list[subprocess.Popen[str]] = []

    def start(locks: bool = False) -> subprocess.Popen[str]:
        preload = {} if locks else {"LD_PRELOAD": str(tmp_path / "source.so")}
        job = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               env={**os.environ, "PYTHONPATH": str(ROOT), **preload}, text=True)
        running.append(job)
        assert said(job) == "ready"
        return job
    yield start
    for job in running:
        job.kill()
        job.communicate()


def said(job: subprocess.Popen[str]) -> str:
    assert job.stdout is not None
    return job.stdout.readline().strip()


def go(job: subprocess.Popen[str]) -> None:
    assert job.stdin is not None
    job.stdin.write("\n")
    job.stdin.flush()


@pytest.mark.promise("B11")
def test_of_jobs_that_race_without_locks_one_has_the_folder_until_it_is_killed(tmp_path: Path, jobs: Any) -> None:
    for round_ in range(3):
        racing = [jobs() for _ in range(3)]
        for job in racing:
            go(job)
        answers = {job: said(job) for job in racing}
        holder, = [job for job, answer in answers.items() if answer == "held"]
        for answer in answers.values():
            assert answer == "held" or re.match(rf"73 .*busy: a job holds it \(host=\S+ pid={holder.pid} since=", answer), answers
        assert [p.name for p in (tmp_path / "run").glob("lock.*")] == [f"lock.{round_ + 1}"]
        holder.send_signal(signal.SIGKILL)
        holder.wait()


@pytest.mark.promise("B11")
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_of_hosts_with_locks_and_without_one_job_at_most_has_the_folder(tmp_path: Path, jobs: Any, rounds: int) -> None:
    for _ in range(rounds):
        racing = [jobs(locks=True), jobs(), jobs(locks=True)]
        for job in racing:
            go(job)
        answers = {job: said(job) for job in racing}
        assert list(answers.values()).count("held") <= 1, answers
        assert all(answer == "held" or re.match("73 .*busy: a job holds it", answer) for answer in answers.values()), answers
        for job in racing:
            job.kill()
            job.wait()
    for with_locks in (True, False):
        first, second, third = jobs(locks=with_locks), jobs(locks=not with_locks), jobs(locks=not with_locks)
        for job in (first, second):
            go(job)
            answer = said(job)
            assert answer == "held" if job is first else f"pid={first.pid} " in answer and answer.startswith("73 "), answer
        first.kill()
        first.wait()
        go(third)
        assert said(third) == "held"
        third.kill()
        third.wait()


def without_locks(file: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "BEAT_S", 0.05)
    monkeypatch.setattr(claim, "STALE_S", 0.8)
    monkeypatch.setattr(claim, "kernel", lambda: Kernel("", ""))        # as for the process of another host


def dead(folder: Path) -> Claim:
    """A claim whose process gives no sign of life."""
    one = Claim(folder)
    one.take()
    one._end.set()
    assert one._thread is not None
    one._thread.join()
    return one


@pytest.mark.promise("B11")
def test_a_holder_on_another_host_is_known_by_its_signs_of_life_and_no_clock_is_compared(
        tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(RunFolder(tmp_path).open()) as run:
        run._claim = Claim(tmp_path)
        run._claim.take()
        monkeypatch.setattr(time, "time", lambda: 4e9)
        for path in tmp_path.glob("lock*"):
            os.utime(path, (0, 0))
        with pytest.raises(OutputError, match=r"busy: a job holds it \(host="):
            Claim(tmp_path).take()
    free = Claim(tmp_path)
    free.take()                                                         # the folder was given back
    free.release()
    assert [path.name for path in tmp_path.glob("lock.*")] == ["lock.2"]


@pytest.mark.promise("B11")
def test_a_holder_that_slept_and_was_taken_for_dead_publishes_nothing_more(tmp_path: Path, quick: None) -> None:
    run = RunFolder(tmp_path).open()
    run._claim = dead(tmp_path)
    store.save(run.checkpoints, 1, [store.Piece.whole("w", np.ones(3))], {})
    saving = store.Save(run.checkpoints, 2, {}, before=run.refuse_lost, channel=store.ALONE)
    saving.begin(lambda: [store.Piece.whole("w", np.zeros(3))])
    saving.work()
    saving.agree()
    other = Claim(tmp_path)
    other.take()
    saving.work()
    with pytest.raises(OutputError, match="another job has taken the run folder .host="):
        saving.agree()
    with pytest.raises(OutputError, match="another job has taken"):
        run.write_json(run.run_json, {})
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"] and not run.run_json.exists()
    other.refuse_lost()
    run.close()
    other.refuse_lost()                                                 # the sleeper took nothing with it
    other.release()


@pytest.mark.parametrize(("number", "kind"), [(errno.ESTALE, StorageError), (errno.ENOENT, LostFolderError)])
def test_a_file_server_that_is_away_for_a_moment_costs_a_holder_nothing(
        tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]) -> None:
    ended: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", ended.append)
    asked = threading.Semaphore(0)

    def away(folder: Path) -> int:
        asked.release()
        raise OSError(number, "away")

    one = Claim(tmp_path / "run")
    one.folder.mkdir()
    one.take()
    with monkeypatch.context() as server:
        if number == errno.ENOENT:
            server.setattr(one, "folder", tmp_path / "unmounted")
        server.setattr(claim, "newest_in", away)
        assert asked.acquire(timeout=20) and asked.acquire(timeout=20)
        with pytest.raises(kind, match=f"looking at the lock file failed: .*{errno.errorcode[number]}"):
            one.refuse_lost()                                           # nothing is published without knowing
    one.refuse_lost()
    assert one._thread is not None and one._thread.is_alive() and not ended
    one.release()
    assert claim.read(tmp_path / "run", 1) == claim.FREE


@pytest.mark.promise("B11")
def test_hosts_with_locks_heed_a_claim_and_leave_other_files_of_that_name_alone(tmp_path: Path, quick: None) -> None:
    (tmp_path / "lock").touch()
    other = Claim(tmp_path)
    other.take()
    with pytest.raises(OutputError, match="busy"):
        RunFolder(tmp_path).open()
    other.release()
    RunFolder(tmp_path).open().close()
    (tmp_path / "lock.9").write_text("mine")
    with pytest.raises(OutputError, match="found another file of that name"):
        RunFolder(tmp_path).open(resume=True)
    assert (tmp_path / "lock.9").read_text() == "mine"


@pytest.mark.promise("B11")
def test_a_lock_of_another_host_that_nobody_sees_is_heeded_until_it_is_given_back(
        tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(RunFolder(tmp_path).open()) as run:
        with monkeypatch.context() as host, pytest.raises(OutputError, match=r"busy: .*by a lock of the file.*remove this"):
            host.setattr(fcntl, "flock", without_locks)
            RunFolder(tmp_path).open(resume=True)
        assert not claim.numbers(tmp_path)
        run.write_json(run.run_json, {})
        other = Claim(tmp_path)                                          # of a host whose file server keeps its answers for long
        other.take()
        with pytest.raises(OutputError, match="another job has taken the run folder .* from a host without file locks"):
            run.write_json(run.run_json, {})
        other.release()
    monkeypatch.setattr(fcntl, "flock", without_locks)
    RunFolder(tmp_path).open(resume=True).close()


@pytest.mark.promise("B11")
def test_a_full_disk_leaves_no_empty_file_and_one_that_is_left_by_a_crash_is_soon_recognized(
        tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as disk, pytest.raises(StorageError, match="making the lock file failed: .*ENOSPC"):
        disk.setattr(os, "pwrite", full)
        Claim(tmp_path).take()
    assert not claim.numbers(tmp_path)
    monkeypatch.setattr(claim, "STALE_S", 3600.0)
    monkeypatch.setattr(claim, "EMPTY_S", 0.2)
    (tmp_path / "lock.7").touch()
    one = Claim(tmp_path)
    one.take()
    assert claim.numbers(tmp_path) == [8]
    one.release()


@pytest.mark.promise("B11")
def test_a_holder_that_wakes_up_while_another_one_takes_its_place_keeps_it(
        tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock.1").touch()
    monkeypatch.setattr(claim, "EMPTY_S", 0.0)
    said = Claim._say

    def wakes(self: Claim, text: str) -> None:
        said(self, text)
        if not (tmp_path / "lock.1").read_bytes():
            (tmp_path / "lock.1").write_bytes(claim.padded(claim.holder() + " nonce=1"))
            monkeypatch.setattr(claim, "is_alive", lambda text: True)
    monkeypatch.setattr(Claim, "_say", wakes)
    with pytest.raises(OutputError, match="busy"):
        Claim(tmp_path).take()
    assert claim.numbers(tmp_path) == [1]
