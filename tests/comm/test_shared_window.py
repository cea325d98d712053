"""Shared memory that cannot be had: pages, limits of one rank, a full file system; and slices, which need no second rank."""

from __future__ import annotations

import errno
import mmap
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import Job, clean_environment, find_mpirun, mpirun
from runs import write

from mpitrain.comm.shared.window import FOLDER_SETTING, _number, _populate, folder, free_bytes, slice_between_lines

ONLY_OPEN_MPI = pytest.mark.skipif("not __import__('launch').is_open_mpi()", reason="needs Open MPI: others have larger files of "
                                   "their own")
FAULTS = Path(__file__).with_name("window_faults.py")


def test_pages_that_are_not_there_are_an_error_number_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    with open(tmp_path / "memory", "wb+") as file:
        file.truncate(4 * mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), 4 * mmap.PAGESIZE)
        block = np.frombuffer(memory, np.uint8)
        assert _populate(block) == 0
        file.truncate(mmap.PAGESIZE)                          # touching the rest would raise SIGBUS
        if _populate(block) == 0:
            pytest.skip("this kernel has no MADV_POPULATE_WRITE")
        assert _populate(block) == errno.EFAULT


def test_the_folder_is_the_one_that_open_mpi_was_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(FOLDER_SETTING, str(tmp_path))
    assert folder() == str(tmp_path) and free_bytes() > 0
    monkeypatch.setenv(FOLDER_SETTING, str(tmp_path / "not there"))
    assert _number(free_bytes) == -errno.ENOENT


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_slices_cover_an_array_once_and_meet_between_cache_lines(n: int, itemsize: int) -> None:
    for count in (0, 1, 5, 100, 4097):
        for address in (4096, 4096 + 3 * itemsize):
            slices = [slice_between_lines(address, itemsize, count, n, rank) for rank in range(n)]
            assert [i for start, stop in slices for i in range(start, stop)] == list(range(count))
            assert all((address + stop * itemsize) % 64 == 0 for _, stop in slices if 0 < stop < count)
            assert count < 100 * n or max(b - a for a, b in slices) - min(b - a for a, b in slices) <= 2 * 64 // itemsize


# ---- ranks that may not have the memory: all of them are told, and none waits -------------------------------------------

def refused(name: str, culprit: int, n: int, *arguments: str) -> str:
    result = mpirun(n, FAULTS, name, str(culprit), *arguments, timeout=30)
    assert result.rc == 0 and result.out.count("done") == n, result.out + result.err
    said, = (line for line in result.out.splitlines() if line.startswith("refused:"))
    return said


@pytest.mark.promise("B3")
def test_a_limit_on_files_is_named_and_leaves_nobody_waiting() -> None:
    said = refused("file", 0, 2)
    assert "files may have 20 MiB (ulimit -f) where 64 MiB of shared memory are needed; raise that limit" in said


@pytest.mark.promise("A3")
@pytest.mark.parametrize(("culprit", "n"), [(0, 2), (1, 2), pytest.param(-1, 3, marks=pytest.mark.slow)])
def test_a_limit_on_addresses_of_any_rank_is_named_and_leaves_nobody_waiting(culprit: int, n: int) -> None:
    said = refused("address", culprit, n)
    assert re.search(r"a process may have (\d+) MiB \(ulimit -v\), \d+ of them taken, where 64 MiB of shared memory are", said)


def test_a_rank_that_cannot_open_the_file_is_a_reason_for_all() -> None:
    assert "No such file or directory where 64 MiB of shared memory are needed" in refused("elsewhere", 1, 2)


def test_without_a_limit_the_same_programs_get_their_memory() -> None:
    result = mpirun(2, FAULTS, "none", "-1", timeout=30)
    assert result.rc == 0 and result.out.count("done") == 2 and "refused: \n" in result.out, result.out + result.err


@pytest.mark.promise("B3")
def test_a_file_system_that_fills_up_after_it_was_asked_is_told_too(tmp_path: Path) -> None:
    """A file system of 4 MiB, in a mount namespace that ends with the job, and a look at it that still finds room."""
    small = tmp_path / "shm"
    small.mkdir()
    inside = f'mount -t tmpfs -o size=4m none {small} && exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", inside, "sh", "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    result = Job(["unshare", "-m", "sh", "-c", inside, "sh", find_mpirun(), "-n", "2", sys.executable, str(FAULTS), "full", "-1",
                  str(small)], clean_environment(), tmp_path).finish(30)
    assert result.rc == 0 and result.out.count("done") == 2, result.out + result.err
    assert f"refused: {small}: No space left on device where 64 MiB of shared memory are needed; free some of it" in result.out


@pytest.mark.promise("B3")
@pytest.mark.parametrize("limited", [pytest.param(True, marks=ONLY_OPEN_MPI), False])
def test_a_run_whose_files_are_limited_trains_by_messages_and_says_why(tmp_path: Path, limited: bool) -> None:
    config = write(tmp_path)
    limit = ["prlimit", "--fsize=150000"] if limited else []
    command = [find_mpirun(), "-n", "2", *limit, sys.executable, "-m", "mpitrain", "train", str(config), "run.out=a"]
    # Python 3.11 writes its bytecode to the limit and takes the rest as written, and other tests read it.
    result = Job(command, {**clean_environment(), "PYTHONDONTWRITEBYTECODE": "1"}, tmp_path).finish(30)
    assert result.rc == 0, result.out + result.err
    notes = [line for line in result.out.splitlines() if "messages instead: files may have 0.1431 MiB (ulimit -f) where" in line]
    assert len(notes) == limited, result.out
