"""The folders mean what they say: imports go one way, each foreign library has its doors, importing starts nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "mpitrain"
LAYERS = [{"errors"}, {"registry"}, {"backend"}, {"schedules", "kernels"}, {"config"}, {"autograd", "comm"}, {"ops"},
          {"nn", "optim", "data"}, {"models"}, {"placement"}, {"parallel"}, {"checkpoint"},
          {"train", "plan"}, {"bench"}, {"cli"}, {"__main__"}]
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}
DOORS = {"mpi4py": {"comm", "train"}, "cupy": {"backend", "kernels"}, "numba": {"backend", "kernels"}}
FILES = sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Dotted names of the modules a file imports, anywhere in it; "from a import b" counts as a.b too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_from_below(path: Path) -> None:
    own = package_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "mpitrain" and len(parts) > 1 and own in LEVEL and parts[1] in LEVEL:
            below = LEVEL[parts[1]] < LEVEL[own] or {own, parts[1]} == {"plan", "train"}
            assert parts[1] == own or below, f"{path.name} of {own} imports {name}"
        if parts[0] in DOORS:
            assert own in DOORS[parts[0]], f"{path.name} of {own} imports {parts[0]}"
        if name.startswith("mpitrain.config"):
            whole = {"cli", "config", "plan", "train"}
            assert own in whole | ({"placement", "parallel", "checkpoint", "bench"} if ".sections" in name else set()), path.name


def test_every_package_has_its_place() -> None:
    assert {package_of(path) for path in FILES} - {"__init__"} == set(LEVEL)


def test_the_world_is_named_once() -> None:
    named = [path for path in FILES for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Attribute) and node.attr == "COMM_WORLD"]
    assert {path.name for path in named} == {"start.py"}


def test_the_local_rank_is_worked_out_once() -> None:
    """Training and evaluation must share out GPUs alike; `comm.start` only repeats the launcher's word, for before MPI."""
    named = [path.name for path in FILES if package_of(path) == "train" for node in ast.walk(ast.parse(path.read_text()))
             if (isinstance(node, ast.FunctionDef) and node.name == "local_rank")
             or (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "local_rank")]
    assert named == ["assembly.py"]


def test_nothing_unpickles_or_evaluates() -> None:
    for path in FILES:
        assert not {name.split(".")[0] for name in imports(path)} & {"pickle", "marshal", "shelve", "dill"}, path
        called = [node.func.id for node in ast.walk(ast.parse(path.read_text()))
                  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        assert not {"eval", "exec"} & set(called), path


def test_importing_the_package_starts_no_mpi_and_loads_nothing_heavy() -> None:
    program = ("import sys, mpitrain; heavy = {'mpi4py', 'numba', 'h5py', 'cupy', 'rich', 'numpy'} & set(sys.modules); "
               "assert not heavy, heavy")
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent)


def test_describing_a_model_starts_no_mpi() -> None:
    program = ("import sys; from mpitrain import models; models.gpt(2, 2, 8, 4, 5); "
               "assert not {'mpi4py', 'numba', 'h5py'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent)


def test_the_training_step_has_no_branch_on_rank_mesh_stage_device_or_precision() -> None:
    from mpitrain.train.trainer import Trainer
    tree = ast.parse((PACKAGE / "train/trainer.py").read_text())
    step, = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "train_step")
    assert not any(isinstance(node, (ast.If, ast.IfExp, ast.While, ast.For)) for node in ast.walk(step))
    assert len(step.body) <= 5 and Trainer.train_step is not None
