"""What killed jobs left in shared memory is removed at the next start; nothing that lives, is young, or is someone else's."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from launch import is_open_mpi, launch, mpirun

from mpitrain.comm.shared.leftovers import (
    HOST,
    SHARED_MEMORY,
    YOUNG,
    _sees_users,
    remove_files,
    remove_folders,
    remove_leftovers,
)

OLD = time.time() - 10 * YOUNG


def made(path: Path, size: int = 1 << 20) -> Path:
    path.write_bytes(bytes(size))
    os.utime(path, (OLD, OLD))
    return path


@pytest.mark.promise("A11")
def test_files_of_dead_jobs_are_removed_and_told_in_one_line(tmp_path: Path) -> None:
    for name in ("sm_segment.n7.1000.5d3a0001.0", "vader_segment.n7.1000.1", "mpitrain-shared-x1", "mpitrain-alive-x1",
                 "mpich_shm_ab12CD", "mpich_shar_tmp104BbD", "Intel_MPI_0bghQG"):
        made(tmp_path / name)
    for name in ("sm_segment", "psm_1234", "mine.sm_segment.x", "sem.mp-abc", "mpich_own"):
        made(tmp_path / name)
    line = remove_files(tmp_path)
    assert line == f"removed what killed jobs of yours left in {tmp_path}: Intel_MPI_0bghQG and 6 more files, 7.0 MiB"
    assert sorted(os.listdir(tmp_path)) == ["mine.sm_segment.x", "mpich_own", "psm_1234", "sem.mp-abc", "sm_segment"]
    assert remove_files(tmp_path) == "" == remove_files(tmp_path / "nowhere")


def test_files_that_a_process_has_mapped_or_open_or_that_are_young_stay(tmp_path: Path) -> None:
    mapped, opened = made(tmp_path / "sm_segment.a"), made(tmp_path / "sm_segment.b")
    with open(mapped, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    young = tmp_path / "sm_segment.c"
    young.write_bytes(b"x")
    with open(opened):
        assert remove_files(tmp_path) == ""
    assert sorted(os.listdir(tmp_path)) == ["sm_segment.a", "sm_segment.b", "sm_segment.c"]
    memory.close()
    assert "sm_segment.a and 1 more files" in remove_files(tmp_path)
    assert os.listdir(tmp_path) == ["sm_segment.c"]


def test_a_file_that_a_process_has_open_stays_where_another_of_its_descriptors_is_closed_meanwhile(tmp_path: Path) -> None:
    opened, process = made(tmp_path / "sm_segment.a"), tmp_path / "processes" / "1"
    (process / "fd").mkdir(parents=True)
    (process / "maps").touch()
    for number in range(20):
        (process / "fd" / str(number)).touch()                # no link: readlink fails, as of one that is closed
    (process / "fd" / "20").symlink_to(opened)
    for number in range(21, 40):
        (process / "fd" / str(number)).touch()
    assert remove_files(tmp_path, tmp_path / "processes") == "" and opened.exists()
    (process / "fd" / "20").unlink()
    assert "sm_segment.a" in remove_files(tmp_path, tmp_path / "processes")


def test_links_folders_and_files_of_others_stay(tmp_path: Path) -> None:
    victim = made(tmp_path / "victim")
    (tmp_path / "sm_segment.link").symlink_to(victim)
    (tmp_path / "sm_segment.folder").mkdir()
    if os.getuid() == 0:
        os.chown(made(tmp_path / "sm_segment.others"), 12345, 12345)
    before = sorted(os.listdir(tmp_path))
    assert remove_files(tmp_path) == "" and sorted(os.listdir(tmp_path)) == before


def launcher(folder: Path, pid: int, host: str = socket.gethostname(), address: str = "tcp4://127.0.0.1:1") -> Path:
    """A folder as Open MPI 5 makes one for the launcher with this number."""
    made_for = folder / f"ompi.{pid}"
    (made_for / "1" / "0").mkdir(parents=True)
    (made_for / f"pmix.{host}.tool.{pid}").write_text(f"prterun-{host}-{pid}@0.0;{address}\n5.0.11\n{pid}\n")
    os.utime(made_for, (OLD, OLD))
    return made_for


@pytest.mark.promise("A11")
def test_folders_of_dead_launchers_are_removed_and_no_others(tmp_path: Path) -> None:
    processes = tmp_path / "processes"
    for pid, name in ((11, "prterun\n"), (12, "prted\n"), (13, "mpirun\n"), (21, "bash\n")):
        (processes / str(pid)).mkdir(parents=True)
        (processes / str(pid) / "comm").write_text(name)
    for pid in (11, 12, 13, 21, 22):
        launcher(tmp_path, pid)
    launcher(tmp_path, 31, host="another")
    os.utime(launcher(tmp_path, 32))                                         # it is young
    (tmp_path / "ompi.33").symlink_to(launcher(tmp_path / "elsewhere", 33))
    (tmp_path / "ompi.22" / "link").symlink_to(made(tmp_path / "victim").parent)
    os.utime(tmp_path / "ompi.22", (OLD, OLD))
    launcher(tmp_path, 34).rename(tmp_path / "ompi.34.old")
    left = {f"ompi.{number}" for number in ("11", "12", "13", "31", "32", "33", "34.old")}
    if os.getuid() == 0:
        os.chown(launcher(tmp_path, 35), 12345, 12345)
        left.add("ompi.35")
    line = remove_folders(tmp_path, processes)
    assert line == f"removed what killed jobs of yours left in {tmp_path}: ompi.21 and 1 more folders"
    assert {name for name in os.listdir(tmp_path) if name.startswith("ompi.")} == left
    assert (tmp_path / "victim").exists() and (tmp_path / "elsewhere" / "ompi.33" / "1").exists()
    assert remove_folders(tmp_path, processes) == "" == remove_folders(tmp_path / "nowhere", processes)
    assert remove_folders(tmp_path, tmp_path / "unknown processes") == ""


@pytest.mark.promise("A11")
def test_a_launcher_that_answers_keeps_its_folder_where_its_process_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        launcher(tmp_path, 41, address=f"tcp4://127.0.0.1:{server.getsockname()[1]}")
        launcher(tmp_path, 42, address="of another kind")
        assert remove_folders(tmp_path, tmp_path / "processes") == ""
    assert remove_folders(tmp_path, tmp_path / "processes").endswith(": ompi.41")


@pytest.mark.promise("A11")
@pytest.mark.parametrize(("ipc", "pid", "sees"), [
    (HOST["ipc"], HOST["pid"], True), (HOST["ipc"], "pid:[1]", False), ("ipc:[1]", "pid:[1]", True), (None, None, True)])
def test_a_container_with_the_hosts_shared_memory_does_not_see_its_users(
        tmp_path: Path, ipc: str | None, pid: str | None, sees: bool) -> None:
    for name, value in (("ipc", ipc), ("pid", pid)):
        if value:
            (tmp_path / name).symlink_to(value)
    assert _sees_users(tmp_path) == sees


@pytest.mark.skipif(not is_open_mpi(), reason="the folder is Open MPI's")
@pytest.mark.promise("A11")
def test_the_next_run_removes_the_folder_of_a_killed_launcher_and_not_that_of_a_live_one(tmp_path: Path) -> None:
    places, train = {"TMPDIR": str(tmp_path)}, ("-m", "mpitrain", "train", "train.eval_every=1000000", "checkpoint.every=0")
    running = launch(1, *train, "train.steps=1000000", "run.out=running", cwd=tmp_path, env=places)
    running.wait_for("step 1/")
    killed = launch(1, "-c", "import time; print('here'); time.sleep(60)", cwd=tmp_path, env=places)
    killed.wait_for("here")
    before = {path.name for path in tmp_path.glob("ompi.*")}
    alive, dead = tmp_path / f"ompi.{running.process.pid}", tmp_path / f"ompi.{killed.process.pid}"
    if before != {alive.name, dead.name}:
        pytest.skip(f"this Open MPI names its folders otherwise: {before}")
    for pid in [killed.process.pid, *killed.ranks()]:
        os.kill(pid, signal.SIGKILL)
    killed.finish()
    for folder in (alive, dead):
        os.utime(folder, (OLD, OLD))
    done = mpirun(1, "-m", "mpitrain", "train", "train.steps=3", "run.out=next", cwd=tmp_path, env=places)
    assert done.rc == 0 and f"left in {tmp_path}: {dead.name}\n" in done.out, done.out + done.err
    assert alive.exists() and not dead.exists()
    running.signal(signal.SIGUSR1)
    assert running.finish().rc == 85


@pytest.mark.alone                                                              # any other job that starts removes them, too
@pytest.mark.promise("A11")
def test_the_next_start_removes_the_segments_of_a_killed_job_and_not_those_of_a_running_one(tmp_path: Path) -> None:
    """The job that is killed is a real one; its files are made to look old, as the next start of a person is later. What each
    start does is done here at once: any job of this user, of other tests too, that started meanwhile would have been the next."""
    train = ("-m", "mpitrain", "train", "train.steps=1000000", "checkpoint.every=0", "train.eval_every=1000000")
    killed = launch(2, *train, "run.out=killed", cwd=tmp_path)
    killed.wait_for("step 1/")
    theirs = segments_of(killed.ranks())
    running = launch(2, *train, "run.out=running", cwd=tmp_path)
    running.wait_for("step 1/")
    alive = segments_of(running.ranks())
    assert theirs and alive and not theirs & alive
    for pid in [killed.process.pid, *killed.ranks()]:                       # the launcher first: it would tidy up
        os.kill(pid, signal.SIGKILL)
    killed.finish()
    left = theirs & set(os.listdir(SHARED_MEMORY))
    for name in alive | left:
        os.utime(SHARED_MEMORY / name, (OLD, OLD))
    told = remove_leftovers({"TMPDIR": str(tmp_path)})
    now = set(os.listdir(SHARED_MEMORY))
    assert alive <= now and not left & now, f"{left} of {theirs}"
    assert not left or "left in /dev/shm: " in "".join(told)
    running.signal(signal.SIGUSR1)
    assert running.finish().rc == 85


def segments_of(pids: list[int]) -> set[str]:
    """The names of the segments that these processes have mapped."""
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            name = line.partition(f"{SHARED_MEMORY}/")[2]
            if name and "(deleted)" not in name:
                found.add(name)
    return found
