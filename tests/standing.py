"""Ranks that stay: commands of mpitrain one after another in the processes of one `mpirun`, which is started once a size.

    from standing import mpirun                  # as that of launch
    from standing import train                   # as that of runs
    mpirun(2, ON_DEVICE, "train", ...)              # with the stand-in for a GPU, as device_program.py has it

A start of two ranks takes 1.5 s of processor time, most of it imports, and a small run a third of that. For commands that end, or
that all ranks refuse alike; what is about processes (a rank that is killed or fails alone, signals, the environment, what a
launcher says) starts its own. A rank that fails alone ends its job here, too; the next command starts another one. Ranks with the
stand-in for a GPU are others than those without; whether they share that GPU ($MPITRAIN_FAKE_BUS) a command says.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import launch
from launch import HangError, Job, Result

PROGRAM = Path(__file__).with_name("standing_program.py")
ON_DEVICE = Path(__file__).parent / "train" / "device_program.py"
BUS = "MPITRAIN_FAKE_BUS"
MOST = 4                                  # ranks of a command; a rank that waits has 90 MiB


class Standing:
    """The ranks of one `mpirun`, and the pipes to each and from all."""

    def __init__(self, n: int, device: bool):
        self.n, self.commands = n, 0
        self.folder = Path(tempfile.mkdtemp(prefix="mpitrain-standing-"))
        for name in (*map(str, range(n)), "done"):
            os.mkfifo(self.folder / name)
        # Opened for both, as opening a pipe for one waits for the other side, which may never come.
        self.ranks = [os.open(self.folder / str(rank), os.O_RDWR) for rank in range(n)]
        self.done = os.open(self.folder / "done", os.O_RDWR | os.O_NONBLOCK)
        self.job: Job = launch.launch(n, PROGRAM, self.folder, *["device"] * device, cwd="/")

    def run(self, words: tuple[str, ...], folder: Path, timeout: float, bus: str | None = None) -> Result:
        self.commands += 1
        out, err = (self.folder / f"{name}-{self.commands}" for name in ("out", "err"))
        out.touch()
        err.touch()
        command = {"words": words, "folder": str(folder), "out": str(out), "err": str(err), "bus": bus}
        began = time.monotonic()
        for rank in self.ranks:
            os.write(rank, json.dumps(command).encode() + b"\n")
        codes: list[str] = []
        while len(codes) < self.n:
            if self.job.process.poll() is not None or time.monotonic() - began > timeout:
                return self.ended(out, err)
            if select.select([self.done], [], [], 0.2)[0]:
                codes += os.read(self.done, 4096).decode().split()
        assert len(set(codes)) == 1, f"ranks end with {codes}\n{err.read_text()}"
        now = time.monotonic()
        return Result(int(codes[0]), out.read_text(errors="replace"), err.read_text(errors="replace"), now - began, now)

    def ended(self, out: Path, err: Path) -> Result:
        """Of the command that has ended the job; HangError where it does not end."""
        said = [path.read_text(errors="replace") for path in (out, err)]
        standing.cache_clear()
        try:
            result = self.job.finish(1.0)
        except HangError as error:
            raise HangError(f"{error}\n--- of the command\n{''.join(said)}{err.read_text(errors='replace')}") from None
        finally:
            self.close()
        return Result(result.rc, said[0] + result.out, said[1] + result.err, result.seconds, result.ended, result.orphans)

    def close(self) -> None:
        """No rank has a command any more, and all end; those that have ended do so, too."""
        for pipe in (*self.ranks, self.done):
            os.close(pipe)
        self.ranks = []
        shutil.rmtree(self.folder)


@cache
def standing(n: int, device: bool = False) -> Standing:
    found = Standing(n, device)
    started.append(found)
    return found


started: list[Standing] = []


def mpirun(n: int, *args: str | os.PathLike[str], timeout: float = 60, env: Mapping[str, str] | None = None,
           cwd: str | os.PathLike[str] | None = None, mpi_args: tuple[str, ...] = ()) -> Result:
    """What launch.mpirun gives, by ranks that stay, if it is a command of mpitrain in the environment of all tests."""
    device = args[:1] == (ON_DEVICE,)
    if not (device or args[:2] == ("-m", "mpitrain")) or set(env or {}) - ({BUS} if device else set()) or mpi_args or n > MOST:
        return launch.mpirun(n, *args, timeout=timeout, env=env, cwd=cwd, mpi_args=mpi_args)
    words = tuple(map(os.fspath, args[1 if device else 2:]))
    return standing(n, device).run(words, Path(cwd or os.getcwd()), timeout, (env or {}).get(BUS))


def train(n: int, config: Path, *arguments: str, timeout: float = 60, **options: Any) -> Result:
    """A run in the folder of its configuration, as `runs.train` starts one."""
    return mpirun(n, "-m", "mpitrain", "train", config, *arguments, timeout=timeout, cwd=config.parent, **options)


def close_all() -> None:
    """At the end of all tests: AssertionError where a process stays."""
    standing.cache_clear()
    for found in started:
        if found.ranks:
            found.close()
            found.job.finish(30)
    started.clear()
