"""Ranks that run one command of mpitrain after another, each as `mpirun -n N python -m mpitrain` would: see standing.py.

    mpirun -n 2 python standing_program.py FOLDER [device]

Each rank reads lines of JSON from the pipe FOLDER/RANK: {"words": [...], "folder": where to run, "out": file, "err": file,
"bus": $MPITRAIN_FAKE_BUS or null}. It writes a line with the exit code to the pipe FOLDER/done. A command that all ranks refuse
alike leaves its one line; a rank that fails by itself ends the job, as ever.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import examined

from mpitrain.cli import main as command_line
from mpitrain.comm.job import guard
from mpitrain.comm.job.failure import describe
from mpitrain.comm.job.guard import Process
from mpitrain.comm.job.start import start
from mpitrain.registry import OWN_FILE
from mpitrain.verbs import train

ALIKE_S = 5.0                    # for what all ranks refuse alike; who does not has not refused it
process = Process()


@contextlib.contextmanager
def output(paths: list[str]) -> Iterator[None]:
    """What this process and its libraries write goes to these files, instead of to stdout and stderr."""
    kept = [os.dup(number) for number in (1, 2)]
    for number, path in enumerate(paths, 1):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in enumerate(kept, 1):
            os.dup2(before, number)
            os.close(before)


def one(words: list[str], world: Any) -> int:
    """The exit code of a command."""
    try:
        code = command_line(words, process)
    except BaseException as error:
        if world.size > 1 and not (guard.is_symmetric(error) and all_come(world, ALIKE_S)):
            process.fail(error)
        failure = describe(error)
        if world.rank == 0:
            process._record(failure, getattr(error, "mpitrain_folder", None), 0, world.size)
            os.write(2, f"{failure.line(0, world.size)}\n".encode())
        return failure.exit_code
    all_come(world, math.inf)
    return code


def all_come(world: Any, seconds: float) -> bool:
    """Whether all ranks are at the end of their command within this time; they leave the cores to those that are not."""
    barrier, end = world.Ibarrier(), time.monotonic() + seconds
    while not (there := barrier.Test()) and time.monotonic() < end:
        time.sleep(0.001)
    return bool(there)


def forget(path: list[str]) -> None:
    """The next command imports its own files: those of users are known by their paths, and those beside them by their names."""
    beside = [folder for folder in sys.path if folder not in path]
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None) or ""
        if name.startswith(OWN_FILE) or os.path.dirname(source) in beside:
            del sys.modules[name]
    sys.path[:] = path
    gc.collect()


def main() -> int:
    if "device" in sys.argv:
        sys.path.insert(0, str(Path(__file__).parent / "train"))
        from device_program import with_stand_in
        with_stand_in()
    world = start().comm
    examined.once(built_in=True)
    train.start_parser = lambda: None                        # type: ignore[assignment, return-value]
    with open(Path(sys.argv[1]) / str(world.rank)) as asked, open(Path(sys.argv[1]) / "done", "w") as done:
        for line in asked:
            command: dict[str, Any] = json.loads(line)
            path = list(sys.path)
            os.chdir(command["folder"])
            os.environ.pop("MPITRAIN_FAKE_BUS", None)
            os.environ.update({"MPITRAIN_FAKE_BUS": command["bus"]} if command["bus"] else {})
            with output([command["out"], command["err"]]):
                code = one(command["words"], world)
            os.chdir("/")
            forget(path)
            done.write(f"{code}\n")
            done.flush()
    return 0


if __name__ == "__main__":
    process.run(main)
