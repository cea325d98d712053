"""A start with warm caches compiles nothing, loads no compiler, and starts no process once MPI runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from launch import mpirun
from runs import train, write

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
from mpitrain.comm.job.guard import Process
def train():
    status = main(["train", *sys.argv[1:]])
    print("compiled", [text for text, _ in noted if " -o " in text])
    print("after MPI", [text for text, late in noted if late])
    print("loaded", [name for name in ("numba", "llvmlite", "cupy", "rich", "mpitrain.comm.watch.seen", "mpitrain.run.evaluating")
                     if name in sys.modules])
    return status
Process().run(train)
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
    start(2)
    for n in (1, 2):
        assert sorted(start(n)) == sorted(n * ["compiled []", "after MPI []", "loaded []"])


def said(out: str) -> list[str]:
    return [line for line in out.splitlines() if "kernels run as loops of Numba" in line]


@pytest.mark.timeout(200)                         # stand-ins, and Numba compiles in memory
@pytest.mark.slow
def test_a_compiler_that_fails_or_is_missing_is_told_in_one_line_by_one_rank(tmp_path: Path) -> None:
    run = write(tmp_path)
    for change, reason in (({"CC": "/bin/false"}, "the C compiler /bin/false fails: exit status 1; make it work, or set CC"),
                           ({"CC": "nowhere", "PATH": str(only_mpirun(tmp_path))},
                            "no C compiler (cc, gcc or clang); install one, or set CC")):
        result = train(2, run, "train.steps=2", "--overwrite", timeout=150,
                       env={"MPITRAIN_CACHE_DIR": str(tmp_path / "cache"), **change})
        assert result.rc == 0, result.err
        line, = said(result.out)
        assert reason in line


def only_mpirun(folder: Path) -> Path:
    """A folder for PATH without a C compiler, of which the launcher itself has no need."""
    (folder / "bin").mkdir()
    for name in ("sh", "env", "uname", "hostname"):
        found = shutil.which(name)
        if found:
            (folder / "bin" / name).symlink_to(found)
    return folder / "bin"


FULL = """
import ctypes, os, sys
libc, folder = ctypes.CDLL(None, use_errno=True), os.environ["MPITRAIN_CACHE_DIR"].encode()
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None) or \
        libc.mount(b"none", folder, b"tmpfs", 0, b"size=200k,mode=700"):
    print("cannot mount")
    sys.exit(0)
with open(folder + b"/full", "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
from mpitrain.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.timeout(200)
@pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
def test_a_run_whose_cache_folder_is_full_goes_on_and_names_it(tmp_path: Path) -> None:
    """A real file system, in a mount namespace that ends with the process; the same without one is tests/backend's."""
    (tmp_path / "program.py").write_text(FULL)
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    result = mpirun(1, tmp_path / "program.py", write(tmp_path), "train.steps=2", cwd=tmp_path, timeout=150,
                    env={"MPITRAIN_CACHE_DIR": str(cache)})
    if "cannot mount" in result.out:
        pytest.skip("this user may not mount")
    assert result.rc == 0, result.err
    line, = said(result.out)
    assert f"the cache folder {cache} cannot be used: No space left on device; make room there, or set MPITRAIN_CACHE_DIR" in line
