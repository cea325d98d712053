"""What a person sees who starts a job in a terminal, or reads its log: a real pty, a real mpirun."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import clean_environment, find_mpirun
from runs import SMALL, train, write

pytestmark = pytest.mark.alone

STARTS = "run: mlp on digits, 2 ranks, cpu, in a"
SIZE = "2,410 parameters, 1,437 training and 360 validation rows; 2 ranks of 1 thread; 50 steps of 48"


def shown(command: list[str], folder: Path, limit: float = 60) -> tuple[int, str]:
    """(exit status, text) of a command on a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(command, cwd=folder, env={**clean_environment(), "TERM": "xterm"}, stdin=slave, stdout=slave,
                               stderr=slave, start_new_session=True)
    os.close(slave)
    text, deadline = b"", time.monotonic() + limit
    try:
        while time.monotonic() < deadline:
            if select.select([master], [], [], 1.0)[0]:
                try:
                    text += os.read(master, 1 << 16)
                except OSError:                   # the last process of the job has closed it
                    break
        return process.wait(5), text.decode().replace("\r\n", "\n")
    finally:
        process.kill()
        os.close(master)


def steps(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+)/50  loss", text, re.MULTILINE)]


def test_a_terminal_under_mpirun_shows_what_starts_then_its_size_then_whole_lines_of_progress(tmp_path: Path) -> None:
    config = write(tmp_path, SMALL.replace("progress_s = 0\n", ""))
    command = [find_mpirun(), "-n", "2", sys.executable, "-m", "mpitrain", "train", str(config), "run.out=a"]
    status, text = shown(command, tmp_path)
    assert status == 0, text
    lines = text.splitlines()
    assert lines[0] == STARTS and SIZE in lines, text
    assert steps(text)[0] == 1 and steps(text)[-1] == 50 and lines.index(SIZE) < text[:text.index("step 1/50")].count("\n")
    assert "\x1b" not in text, "a bar would not come through the launcher"


@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_a_log_has_the_same_lines_and_a_quiet_run_none(tmp_path: Path, options: tuple[str, ...]) -> None:
    result = train(2, write(tmp_path, SMALL.replace("progress_s = 0\n", "")), "run.out=a", *options)
    assert result.rc == 0, result.err
    if options:
        assert result.out == ""
    else:
        assert result.out.splitlines()[:2] == [STARTS, SIZE] and {1, 50} <= set(steps(result.out)) and len(steps(result.out)) < 5
