"""Every ``*_mpi.py`` file under tests/, on 1, 2, 3 and 4 ranks: one mpirun for each count."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from launch import ROOT, mpirun

pytestmark = pytest.mark.alone

FILES = sorted((ROOT / "tests").rglob("*_mpi.py"))


def test_there_are_files_to_run() -> None:
    assert FILES


def test_make_runs_the_same_files() -> None:
    said = subprocess.run(["make", "-n", "test-2"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = [pattern for line in said.splitlines() for pattern in re.findall(r"\S*_mpi\.py", line)]
    assert sorted(path for pattern in named for path in ROOT.glob(pattern)) == FILES


def test_no_other_file_marks_tests_that_nothing_would_run() -> None:
    """mpi4py's plugin skips what is marked so without --with-mpi, which is given to these files alone."""
    mark = re.compile(r"^@pytest\.mark\.mpi\b", re.M)
    assert [path.name for path in (ROOT / "tests").rglob("test_*.py") if mark.search(path.read_text())] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4)), 2])
def test_the_collective_tests_pass_on_ranks(n: int, tmp_path: Path) -> None:
    run(n, tmp_path, *map(str, FILES))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [5, 8])
def test_collectives_pass_on_more_ranks_and_off_powers_of_two(n: int, tmp_path: Path) -> None:
    run(n, tmp_path, str(ROOT / "tests/comm/collectives_mpi.py"), str(ROOT / "tests/comm/exchange_mpi.py"),
        "-k", "flight or every_root or exchange")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_shared_memory_passes_where_ranks_outnumber_cores(tmp_path: Path) -> None:
    run(8, tmp_path, str(ROOT / "tests/comm/shared_mpi.py"), "-k", "native and (flight or again or several_nodes or left_fold)")


def run(n: int, tmp_path: Path, *args: str) -> None:
    """With two plug-ins only: loading all that are installed took 3 s of processor time on each rank, these 0.9 s."""
    result = mpirun(n, "-m", "pytest", "-q", "-x", "-p", "pytest_mpi", "-p", "pytest_timeout", "-p", "no:cacheprovider",
                    "--with-mpi", *args, timeout=280, cwd=ROOT,
                    env={"PYTEST_DEBUG_TEMPROOT": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert result.rc == 0, result.out[-6000:] + result.err[-6000:]
    assert result.out.count(" passed") == n, result.out[-6000:]
