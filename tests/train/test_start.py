"""A start with warm caches compiles nothing, loads no compiler, and starts no process once MPI runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import mpirun
from runs import write

from mpitrain.backend import native

# What the process starts and loads is noted on the way, and printed by each rank at its end.
PROGRAM = """
import sys
noted = []
def note(event, arguments):
    if event == "subprocess.Popen":
        noted.append((" ".join(arguments[1]) , "mpi4py.MPI" in sys.modules))
    elif event in ("os.fork", "os.forkpty", "os.posix_spawn", "os.system"):
        noted.append((event, "mpi4py.MPI" in sys.modules))
sys.addaudithook(note)
from mpitrain.cli import main
from mpitrain.comm.guard import run_guarded
def train():
    status = main(["train", *sys.argv[1:]])
    print("compiled", [text for text, _ in noted if " -o " in text])
    print("after MPI", [text for text, late in noted if late])
    print("loaded", [name for name in ("numba", "llvmlite", "cupy", "rich") if name in sys.modules])
    return status
run_guarded(train)
"""


@pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
def test_a_warm_start_compiles_nothing_loads_no_compiler_and_starts_no_process_after_mpi(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    run = write(tmp_path)

    def start(n: int) -> list[str]:
        result = mpirun(n, tmp_path / "program.py", run, "train.steps=2", "--overwrite", "--quiet", cwd=tmp_path)
        assert result.rc == 0, result.err
        return result.out.splitlines()
    start(1)                                      # fills the caches, where no other test has
    for n in (1, 2):
        assert sorted(start(n)) == sorted(n * ["compiled []", "after MPI []", "loaded []"])
