"""Start `mpirun` as a child of a test: own session, hard deadline, clean environment, and no process left behind.

    result = mpirun(3, "-m", "mpitrain", "train", "run.toml", cwd=tmp_path)
    assert result.rc == 0 and result.error_lines == []

Each process of a job carries a tag in its environment, inherited by whatever it starts; `Job.finish` looks for the tag in
/proc when `mpirun` has ended and fails if a process outlived it. When the deadline passes, every rank is asked for its
stack first (SIGABRT: Python's fault handler answers, also from inside a blocked MPI call).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAG = "MPITRAIN_TEST_JOB"
GRACE = 3.0                               # seconds a process may take to go after mpirun has ended
STACK = "most recent call first"          # what Python's fault handler writes above a stack
UNBORN = "PMIx server's listener thread failed to start"     # mpirun gave up before it started any rank
STARTS = 3                                # how often it may, in a row
POLL = 0.01


@dataclass(frozen=True)
class Result:
    """What a finished job left: exit code, output, wall time, when it ended (time.monotonic), and who outlived it."""

    rc: int
    out: str
    err: str
    seconds: float
    ended: float
    orphans: tuple[int, ...] = ()

    @property
    def error_lines(self) -> list[str]:
        """The lines on stderr that start with ``mpitrain:``; a failed job has exactly one."""
        return [line for line in self.err.splitlines() if line.startswith("mpitrain:")]


class HangError(AssertionError):
    """The job did not end by itself; the text holds every rank's stack."""


class LauncherError(HangError):
    """Every rank had ended, and `mpirun` itself had not."""


class Job:
    """A running `mpirun`; `signal` it, wait for its output, then `finish`."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: str | os.PathLike[str] | None):
        self.tag = uuid.uuid4().hex
        self._folder = Path(tempfile.mkdtemp(prefix="mpitrain-job-"))
        self.started = time.monotonic()
        self._command = command
        with open(self._folder / "out", "wb") as out, open(self._folder / "err", "wb") as err:
            self.process = subprocess.Popen(command, env={**env, TAG: self.tag}, cwd=cwd, stdin=subprocess.DEVNULL,
                                            stdout=out, stderr=err, start_new_session=True)

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Ids of the processes `mpirun` started (not its own, and not those that watch them), as far as they run now."""
        return [pid for pid in tagged(self.tag) if pid != self.process.pid and not is_watcher(pid) and not is_guardian(pid)]

    def wait_for(self, text: str, timeout: float = 30) -> None:
        """Return when `text` has appeared on stdout; AssertionError if the job ends or the time passes before."""
        deadline = time.monotonic() + timeout
        while text not in self.out:
            ended = self.process.poll() is not None
            if (ended and text not in self.out) or time.monotonic() > deadline:
                self._kill()
                raise AssertionError(f"no {text!r} on stdout\n{self._report()}")
            time.sleep(POLL)

    def signal(self, number: int) -> None:
        """Send a signal to `mpirun` itself, as a terminal or a batch system does; Intel's is a script that passes none on."""
        own = self.process.pid
        inside = [int(child) for child in Path(f"/proc/{own}/task/{own}/children").read_text().split()
                  if Path(f"/proc/{child}/comm").read_text() == "mpiexec.hydra\n"]
        send((inside or [own])[0], number)

    def finish(self, timeout: float = 60, *, allow_orphans: bool = False) -> Result:
        """Wait for the end. HangError past the deadline; AssertionError if processes are left (they are killed)."""
        if not self._ends_within(timeout):
            if not self.ranks():
                self._kill()
                raise LauncherError(f"the ranks have ended, mpirun has not within {timeout} s\n{self._report()}")
            self._dump_stacks()
            self._kill()
            raise HangError(f"no end within {timeout} s\n{self._report()}")
        ended = time.monotonic()
        orphans = self._wait_for_ranks()
        self._kill()
        result = Result(self.process.returncode, self.out, self.err, ended - self.started, ended, orphans)
        if orphans and not allow_orphans:
            raise AssertionError(f"processes {orphans} outlived mpirun\n{self._report()}")
        shutil.rmtree(self._folder)
        return result

    def _ends_within(self, timeout: float) -> bool:
        """Whether `mpirun` ends by then; told at once, where Popen.wait(timeout) looks every 50 ms."""
        if self.process.poll() is not None:
            return True
        process = os.pidfd_open(self.process.pid)
        try:
            ended = bool(select.select([process], [], [], timeout)[0])
        finally:
            os.close(process)
        if ended:
            self.process.wait()
        return ended

    def _wait_for_ranks(self) -> tuple[int, ...]:
        wait_until(lambda: not tagged(self.tag))
        return tuple(tagged(self.tag))

    def _dump_stacks(self) -> None:
        """Every Python rank's stack on stderr. Launchers, of which MPICH has one per node, are stopped meanwhile: they would end
        the others with the first."""
        ranks = [pid for pid in self.ranks() if is_python(pid)]
        expected = self.err.count(STACK) + len(ranks)
        launchers = {self.process.pid, *map(parent, ranks)} & {self.process.pid, *tagged(self.tag)}
        for pid in launchers:
            send(pid, signal.SIGSTOP)
        for pid in ranks:
            send(pid, signal.SIGABRT)
        wait_until(lambda: not set(ranks) & set(tagged(self.tag)))
        for pid in launchers:
            send(pid, signal.SIGCONT)
        wait_until(lambda: self.err.count(STACK) >= expected)

    def _kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for pid in tagged(self.tag):
            send(pid, signal.SIGKILL)
        self.process.wait()
        self._wait_for_ranks()
        # A killed Open MPI 5 leaves its folder, and the mpirun that gets its number next ends before it starts a rank (UNBORN).
        shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{self.process.pid}", ignore_errors=True)

    def _report(self) -> str:
        return f"$ {' '.join(self._command)}\n--- stdout\n{self.out[-8000:]}\n--- stderr\n{self.err[-16000:]}"


def launch(n: int, *args: str | os.PathLike[str], env: Mapping[str, str] | None = None,
           cwd: str | os.PathLike[str] | None = None, mpi_args: tuple[str, ...] = ()) -> Job:
    """Start ``python *args`` on `n` ranks; `env` is added to a scrubbed environment, `mpi_args` to mpirun's own."""
    command = [find_mpirun(), *mpi_args, "-n", str(n), sys.executable, *map(os.fspath, args)]
    return Job(command, {**clean_environment(), **(env or {})}, cwd)


def mpirun(n: int, *args: str | os.PathLike[str], timeout: float = 60, env: Mapping[str, str] | None = None,
           cwd: str | os.PathLike[str] | None = None, mpi_args: tuple[str, ...] = ()) -> Result:
    """Run ``python *args`` on `n` ranks to its end; once more where the launcher ended before there was a rank."""
    for _ in range(STARTS):
        result = launch(n, *args, env=env, cwd=cwd, mpi_args=mpi_args).finish(timeout)
        if UNBORN not in result.err:
            break
    return result


def find_mpirun() -> str:
    """The mpirun beside this Python (the wheel's), else the one on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun beside the interpreter or on PATH"
    return found


@functools.cache
def is_mpich() -> bool:
    """Whether that mpirun is MPICH's own, not Intel's."""
    said = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True, env=clean_environment()).stdout
    return "HYDRA" in said


@functools.cache
def may_end_with_0() -> bool:
    """Whether that mpirun is MPICH 4.1's: 0 was the end of 8 in 156 jobs whose ranks ended without its abort; of 4.3.2's none."""
    said = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True, env=clean_environment()).stdout
    return re.search(r"Version:\s+4\.1\.", said) is not None


@functools.cache
def is_open_mpi() -> bool:
    """Whether that mpirun is Open MPI's."""
    said = subprocess.run([find_mpirun(), "--version"], capture_output=True, text=True, env=clean_environment()).stdout
    return "Open MPI" in said or "prterun" in said


def clean_environment() -> dict[str, str]:
    """Ours, less what an outer mpirun left (a nested one refuses it), plus what root and few cores need.

    Open MPI 5 reads the PRTE_ name for oversubscription, Open MPI 4 the OMPI_ one. A rank that waits gives its core away, as two
    tests run at a time: where ranks of two jobs shared two cores, a run of 2 ranks took 3.1 s of which it computed 1.7, and 3.8 s
    and 2.0 where each rank that waited kept its core (medians of 5 pairs, 2026-11).
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_"))}
    env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
               PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe", OMPI_MCA_rmaps_base_oversubscribe="1",
               OMPI_MCA_mpi_yield_when_idle="1", OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1", PYTHONUNBUFFERED="1",
               PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")])))
    env.setdefault("HOME", tempfile.gettempdir())     # Open MPI 5 does not start without one
    return env


def tagged(tag: str) -> list[int]:
    """Ids of the live processes that carry the tag (zombies do not count)."""
    needle = f"{TAG}={tag}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):        # it ended while we looked, or is another user's
                if needle in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when it holds, at the latest after GRACE seconds."""
    deadline = time.monotonic() + GRACE
    while not condition() and time.monotonic() < deadline:
        time.sleep(POLL)


def is_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    return False


def is_watcher(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"watch.watcher" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def is_guardian(pid: int) -> bool:
    """Whether it is the process that puts the limits of a host back."""
    with contextlib.suppress(OSError):
        return b"energy.guardian" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
