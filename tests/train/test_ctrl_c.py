"""Ctrl-C in a terminal, once and twice: the terminal sends SIGINT to all processes of the foreground, mpirun's group."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import TAG, clean_environment, find_mpirun, send, tagged, wait_until
from runs import lines, record, train, write

from mpitrain.checkpoint import store

pytestmark = pytest.mark.alone

CTRL_C = b"\x03"


class Terminal:
    """A job in the foreground of a terminal of its own."""

    def __init__(self, command: list[str], folder: Path):
        self.tag, self.text = uuid.uuid4().hex, b""
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execve(command[0], command, {**clean_environment(), TAG: self.tag, "TERM": "xterm"})

    def read_until(self, word: bytes, limit: float) -> bool:
        """Whether the word has come; False at the end of the job, too."""
        deadline = time.monotonic() + limit
        while word not in self.text and time.monotonic() < deadline:
            if select.select([self.file], [], [], 0.2)[0]:
                try:
                    self.text += os.read(self.file, 1 << 16)
                except OSError:                          # its last process has ended
                    return False
        return word in self.text

    def press(self, keys: bytes) -> None:
        os.write(self.file, keys)

    def end(self, limit: float) -> int:
        """Its exit status."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            self.read_until(b"\0never", 0.2)                 # a terminal that nobody reads holds its writers up
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        raise AssertionError(f"no end within {limit} s\n{self.text.decode()}")

    def close(self) -> None:
        for pid in tagged(self.tag):
            send(pid, signal.SIGKILL)
        os.close(self.file)


@pytest.fixture(params=[2, pytest.param(1, marks=pytest.mark.slow)])
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """A run, under mpirun or alone, that saves all the time and has begun to."""
    launcher = [find_mpirun(), "-n", "2"] if request.param == 2 else []
    command = [*launcher, sys.executable, "-m", "mpitrain", "train", str(write(tmp_path)), "run.out=a",
               "train.steps=100000", "checkpoint.every=2", "train.eval_every=0"]
    one = Terminal(command, tmp_path)
    assert one.read_until(b"saved", 30), one.text.decode()
    yield one
    one.close()


@pytest.mark.promise("E3")
@pytest.mark.parametrize("keys", [pytest.param([CTRL_C], id="once"), pytest.param([CTRL_C * 2], id="twice at once"),
                                  pytest.param([CTRL_C, CTRL_C], id="twice")])
def test_ctrl_c_leaves_no_process_and_a_checkpoint_that_goes_on(tmp_path: Path, terminal: Terminal, keys: list[bytes]) -> None:
    before = time.monotonic()
    for more in keys:
        terminal.press(more)
        terminal.read_until(b"^C" * len(more), 1.0)             # the terminal has taken the key, and sent its signal
    status = terminal.end(20)
    assert time.monotonic() - before < 5 and status != 0, terminal.text.decode()
    wait_until(lambda: not tagged(terminal.tag))
    assert tagged(terminal.tag) == []
    assert lines(tmp_path / "a")[-1]["step"] >= 2                   # every line parses
    found = store.latest(tmp_path / "a/checkpoints")
    more = (f"train.steps={found.step + 3}", "optimizer.schedule=constant")
    assert train(2, tmp_path / "run.toml", "run.out=a", "--resume", *more).rc == 0
    assert record(tmp_path / "a")["steps"] == found.step + 3
