"""Ctrl-C of a program alone, wherever it arrives: one line, code 130, an end within seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launch import clean_environment

PROGRAM = """
import os, signal, threading
from mpitrain.comm.job.guard import Process

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class Dropped:
    def __del__(self):
        interrupt()                                    # Python prints what is raised here, and goes on

def in_a_destructor():
    Dropped()
    threading.Event().wait()

def while_it_ends():
    try:
        interrupt()
    finally:
        for _ in range(100):
            interrupt()

def with_its_own_end():
    import atexit
    atexit.register(print, "the program's own end", flush=True)
    interrupt()

Process().run({name})
"""


def run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.replace("{name}", name)]
    return subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=20)


@pytest.mark.promise("A1", "E3")
@pytest.mark.parametrize("name", ["in_a_destructor", "while_it_ends", "with_its_own_end"])
def test_an_interrupt_ends_the_program_with_its_line_and_code(name: str, tmp_path: Path) -> None:
    result = run(name, tmp_path)
    assert result.returncode == 130, result.stderr
    assert result.stderr.count("mpitrain: E_INTERRUPT rank=0/1") == 1
    assert ("own end" in result.stdout) == (name == "with_its_own_end")
