"""The folders mean what they say: imports go one way, each foreign library has its doors, importing starts nothing."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mpitrain"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
RULES = ConfigParser()
RULES.read(ROOT / "setup.cfg")                    # where the rule is written; import-linter and README have it from there


def lines(contract: str, key: str) -> list[str]:
    return [line.replace("mpitrain.", "") for line in RULES[f"importlinter:contract:{contract}"][key].split("\n") if line]


LAYERS = lines("flow", "layers")                  # from the top down; those that "|" joins do not import each other
LEVEL = {name: -i for i, line in enumerate(LAYERS) for name in re.findall(r"\w+", line)}
DOORS = [({*lines(contract, "source_modules")}, {*lines(contract, "forbidden_modules")})
         for contract in ("no-mpi-below", "mpi", "config", "compilers")]


def test_what_metrics_are_compared_with_comes_with_the_tests_and_its_dependencies() -> None:
    """Installed alone, for the data of an example, scikit-learn cannot be imported, and the comparison to 1e-12 is skipped."""
    alone = re.search(r"^EXAMPLES_PIP = (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert alone is not None and "scikit-learn" not in alone[1]
    assert "scikit-learn" in [re.split("[<>=]", line)[0] for line in RULES["options.extras_require"]["test"].split("\n")]


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache                                  # to parse the whole package takes three seconds
def imports(path: Path) -> tuple[str, ...]:
    """Dotted names of the modules a file imports, anywhere in it; "from a import b" counts as a.b too."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def nodes(path: Path, *words: str) -> Iterator[ast.AST]:
    """What a file is made of where it has one of the words at all; nothing of others, which need not be parsed."""
    text = path.read_text()
    if re.search(rf"\b({'|'.join(words)})\b", text):
        yield from ast.walk(ast.parse(text))


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """The sets of more than one module that reach each other."""
    reached = {}
    for start in arrows:
        stack, reached[start] = [start], set[str]()
        while stack:
            for name in arrows[stack.pop()] - reached[start]:
                reached[start].add(name)
                stack.append(name)
    found: list[set[str]] = []
    for name in arrows:
        circle = {other for other in reached[name] if name in reached[other]}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def test_imports_go_round_in_no_circle() -> None:
    """Of all imports, those in functions and those for annotations alone among them; no arrow to a package from its own files."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d", "a"}}) == [{"b", "c"}]
    arrows = {}
    for name, path in MODULES.items():
        found = {imported if imported in MODULES else imported.rpartition(".")[0] for imported in imports(path)}
        arrows[name] = {other for other in found & set(MODULES) if other != name}
    assert circles(arrows) == []


def test_no_import_runs_back_up() -> None:
    up = []
    for path in FILES:
        own = package_of(path)
        for name in imports(path):
            other = name.removeprefix("mpitrain.").partition(".")[0]
            here, there = LEVEL.get(own, 0), LEVEL.get(other, -99)
            higher = name.startswith("mpitrain.") and other != own and (there > here or there == here and "|" in LAYERS[-here])
            if higher or any(own in packages and other in forbidden for packages, forbidden in DOORS):
                up.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not up


def test_the_readme_has_the_rule_as_setup_cfg_has_it() -> None:
    assert f"`{' > '.join(LAYERS)}`" in (ROOT / "README.md").read_text().replace("\n", " ")


def test_every_package_has_its_place() -> None:
    assert {package_of(path) for path in FILES} - {"__init__"} == set(LEVEL)


def test_the_world_is_named_once() -> None:
    named = [path for path in FILES for node in nodes(path, "COMM_WORLD")
             if isinstance(node, ast.Attribute) and node.attr == "COMM_WORLD"]
    assert {path.name for path in named} == {"start.py"}


def test_the_local_rank_is_worked_out_once() -> None:
    """Training and evaluation must share out GPUs alike; `comm.start` only repeats the launcher's word, for before MPI."""
    named = [path.name for path in FILES if package_of(path) == "train" for node in nodes(path, "local_rank")
             if (isinstance(node, ast.FunctionDef) and node.name == "local_rank")
             or (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "local_rank")]
    assert named == ["assembly.py"]


@pytest.mark.promise("F1")
def test_nothing_unpickles_or_evaluates() -> None:
    for path in FILES:
        assert not {name.split(".")[0] for name in imports(path)} & {"pickle", "marshal", "shelve", "dill"}, path
        called = [node.func.id for node in nodes(path, "eval", "exec")
                  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        assert not {"eval", "exec"} & set(called), path


PICKLING = {"bcast", "allgather", "alltoall", "isend", "irecv", "issend", "sendrecv", "recv", "ssend", "bsend", "scan", "exscan"}
OURS_TOO = {"allreduce", "gather", "scatter", "reduce", "send"}         # names of our channels' methods, which send buffers


def pickling_calls(code: Iterable[ast.AST]) -> list[str]:
    """Calls of mpi4py's lower-case methods, which pickle what they send."""
    found = []
    for node in code:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            whose = ast.unparse(node.func.value).rpartition(".")[2]
            if node.func.attr in PICKLING or node.func.attr in OURS_TOO and whose in ("comm", "host", "world", "base"):
                found.append(ast.unparse(node.func))
    return found


@pytest.mark.promise("F1", "F11")
def test_ranks_send_each_other_buffers_and_json_and_never_pickles() -> None:
    wrong = "comm.bcast(1); self.comm.allreduce(2); channel.allreduce(x); comm.Bcast(x)"
    assert pickling_calls(ast.walk(ast.parse(wrong))) == ["comm.bcast", "self.comm.allreduce"]
    words = "comm", "host", "world", "base", *PICKLING
    assert {str(path.relative_to(PACKAGE)): calls for path in FILES if (calls := pickling_calls(nodes(path, *words)))} == {}


def test_importing_the_package_starts_no_mpi_and_loads_nothing_heavy() -> None:
    program = ("import sys, mpitrain; heavy = {'mpi4py', 'numba', 'h5py', 'cupy', 'rich', 'numpy'} & set(sys.modules); "
               "assert not heavy, heavy")
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent)


def test_describing_a_model_starts_no_mpi() -> None:
    program = ("import sys; from mpitrain import models; models.gpt(2, 2, 8, 4, 5); "
               "assert not {'mpi4py', 'numba', 'h5py'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PACKAGE.parent)


def test_the_training_step_has_no_branch_on_rank_mesh_stage_device_or_precision() -> None:
    tree = ast.parse((PACKAGE / "train/trainer.py").read_text())
    step, = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "train_step")
    assert not any(isinstance(node, (ast.If, ast.IfExp, ast.While, ast.For)) for node in ast.walk(step))
    assert len(step.body) <= 5
