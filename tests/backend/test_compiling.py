"""Compiling ahead: children that share the sources of native/device, with a CuPy that writes down what it compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from mpitrain.backend.cache import cache_folder, one_at_a_time
from mpitrain.backend.compiling import SLOWEST, compile_ahead, in_order
from mpitrain.backend.runtime import device_folder

CUPY = '''
__version__ = "14.2.0"
from . import cuda
'''
CUDA = '''
from types import SimpleNamespace
from . import compiler
Device = lambda number=0: SimpleNamespace(compute_capability="90")
is_available = lambda: True
'''
COMPILER = '''
import os
_get_nvrtc_version = lambda: (12, 9)
def compile_using_nvrtc(text, options, filename, cache_in_memory):
    with open(os.environ["COMPILED"], "a") as file:
        file.write(f"{filename} {os.getpid()}\\n")
    return f"code of {filename}".encode(), None
'''
PROGRAM = '''
from mpitrain.backend.compiling import _children, compile_ahead
print(compile_ahead("gpu"), [child.wait() for child in _children], compile_ahead("gpu") - len(_children))
'''


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "cupy" / "cuda").mkdir(parents=True)
    (tmp_path / "cupy" / "__init__.py").write_text(CUPY)
    (tmp_path / "cupy" / "cuda" / "__init__.py").write_text(CUDA)
    (tmp_path / "cupy" / "cuda" / "compiler.py").write_text(COMPILER)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "MPITRAIN_CACHE_DIR": str(tmp_path / "kept"),
            "COMPILED": str(tmp_path / "compiled")}


def run(environment: dict[str, str], *arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True, text=True).stdout


def test_children_compile_each_source_once_and_nothing_is_left_to_do(environment: dict[str, str], tmp_path: Path) -> None:
    n_children = min(12, os.cpu_count() or 1)
    assert run(environment, "-c", PROGRAM) == f"{n_children} {[0] * n_children} 0\n"
    compiled = Counter(line.split()[0] for line in (tmp_path / "compiled").read_text().splitlines())
    sources = {path.name for path in device_folder().glob("*.cu")}
    assert compiled == dict.fromkeys(sources, 1)
    assert {path.read_text() for path in (tmp_path / "kept").glob("*-90-*.cubin")} == {f"code of {name}" for name in sources}


def test_a_child_leaves_alone_what_another_process_is_at(environment: dict[str, str], tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPITRAIN_CACHE_DIR", environment["MPITRAIN_CACHE_DIR"])
    cache_folder.cache_clear()
    try:
        where = run(environment, "-c", "from mpitrain.backend.cuda import kept_at; print(kept_at('sums', '90').name, end='')")
        with one_at_a_time(where):
            run(environment, "-m", "mpitrain.backend.compiling", "90", "sums", "rows")
    finally:
        cache_folder.cache_clear()
    assert [line.split()[0] for line in (tmp_path / "compiled").read_text().splitlines()] == ["rows.cu"]


def test_a_child_that_may_not_choose_its_cores_compiles_on_those_it_has(environment: dict[str, str], tmp_path: Path) -> None:
    refused = "import os; os.sched_setaffinity = lambda *given: os.stat('/nowhere'); "
    run(environment, "-c", f"{refused}from mpitrain.backend.compiling import main; main('90', ['sums'])")
    assert [line.split()[0] for line in (tmp_path / "compiled").read_text().splitlines()] == ["sums.cu"]


def test_a_lock_that_another_has_is_not_waited_for_where_that_is_said() -> None:
    with one_at_a_time("a test") as mine, one_at_a_time("a test", wait=0) as too:
        assert mine and not too


def test_those_that_take_longest_come_first_and_none_is_left_out() -> None:
    assert in_order()[:len(SLOWEST)] == list(SLOWEST)
    assert sorted(in_order()) == sorted(path.stem for path in device_folder().glob("*.cu"))


def test_a_run_on_the_host_starts_no_child() -> None:
    assert compile_ahead("cpu") == 0
