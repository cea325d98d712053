"""`inspect` refuses exactly what `train` refuses, with the same line: a table of configurations on one, two and four ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import ROOT, mpirun

from mpitrain.cli import main
from mpitrain.config import load_config
from mpitrain.config.rules import Facts, check_model
from mpitrain.errors import ConfigError, UsageError
from mpitrain.schedules.grid import Grid

sys.path.insert(0, str(Path(__file__).parent))
import rules_table
from rules_table import CASES, RANKS, Case

PROGRAM = Path(__file__).parent / "rules_table.py"
NO_GPU = "CuPy cannot be imported"               # of this machine, and no part of a configuration: `inspect` plans for others too


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("rules")
    rules_table.write(where)
    return where


@pytest.fixture(scope="module")
def inspected(folder: Path) -> dict[str, list[Any]]:
    """What `inspect` says where there is no mpi4py."""
    done = subprocess.run([sys.executable, PROGRAM, folder, *map(str, RANKS)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [pytest.param(n, marks=() if n == 1 else pytest.mark.slow) for n in RANKS])
def test_inspect_and_train_say_the_same(folder: Path, inspected: dict[str, list[Any]], n: int) -> None:
    result = mpirun(n, PROGRAM, folder, cwd=folder, timeout=280)
    assert result.rc == 0, result.err[-3000:]
    trained = json.loads(result.out.splitlines()[-1])
    wrong = []
    for case, planned, ran in zip(CASES, inspected[str(n)], trained, strict=True):
        if planned != ran and NO_GPU not in ran[1]:
            wrong.append(f"{case}: inspect says {planned}, train {ran}")
        if n in case.on and (case.said not in ran[1] or bool(case.said) != bool(ran[0])):
            wrong.append(f"{case}: train says {ran}")
    assert not wrong, "\n".join(wrong)


def test_the_table_is_large_and_has_runs_that_start() -> None:
    assert sum(bool(case.said) for case in CASES) >= 60 and sum(not case.said for case in CASES) >= 10


@pytest.mark.parametrize(("words", "message"), [
    (("mlp.toml", "--ranks", "0"), "--ranks must be at least 1, found 0"), (("mlp.toml", "--ranks", "-3"), "found -3"),
    (("tokens", "nonsense.key=3"), "nonsense.key=3 is for a configuration (.toml), and tokens is none"),
    (("tokens", "--ranks", "9"), "--ranks is for a configuration (.toml), and tokens is none")])
def test_inspect_refuses_words_that_mean_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...],
                                                 message: str) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=re.escape(message)):
        main(["inspect", *words])


@pytest.mark.parametrize("case", [case for case in CASES if case.overrides in (
    "comm.algorithm=rign", "model.inputs=63", "mesh.pp=2 mesh.schedule=own.py:backwards")], ids=lambda case: case.overrides)
def test_both_commands_end_alike(folder: Path, case: Case) -> None:
    """The whole way: exit status, and the one line but for `rank=r/n host=`."""
    keys = case.overrides.split()
    planned = subprocess.run([sys.executable, "-m", "mpitrain", "inspect", f"{case.file}.toml", *keys, "--ranks", "2"],
                             capture_output=True, text=True, cwd=folder, env={"PATH": "", "PYTHONPATH": str(ROOT)})
    ran = mpirun(2, "-m", "mpitrain", "train", f"{case.file}.toml", *keys, "run.out=whole", cwd=folder)
    lines = [re.sub(r"rank=\d/\d host=\S+?:? ", "", line) for line in (planned.stderr.strip(), *ran.error_lines)]
    assert planned.returncode == ran.rc != 0 and len(lines) == 2 and lines[0] == lines[1] and case.said in lines[0]
    assert planned.stdout == "" and not (folder / "whole").exists()


@pytest.mark.parametrize(("overrides", "closure", "found"), [
    (["comm.sharding=optimizer"], "", 'comm.sharding = "optimizer"; set comm.sharding = "none"'),
    (["comm.node_shared=true"], "", "comm.node_shared = true; set comm.node_shared = false"),
    ([], "LBFGS", "LBFGS; set another optimizer.name")])
def test_rows_that_are_scaled_on_all_ranks_need_whole_tables(overrides: list[str], closure: str, found: str) -> None:
    config = load_config(None, ["model.name=mlp", "data.path=digits", "optimizer.clip_norm=0", *overrides])
    facts = Facts(2, 8, scaled="table", closure=closure)
    said = (f'max_norm of the embedding "table" changes rows on all ranks before the update, which needs whole parameters and '
            f"one update a step, found {found}, or leave")
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_model(config, Grid({"dp": 2}), facts)
    if not closure:
        check_model(config, Grid({"dp": 1}), facts)


def test_an_optimizer_that_computes_the_loss_several_times_leaves_out_no_step() -> None:
    config = load_config(None, ["model.name=mlp", "data.path=digits", "optimizer.clip_norm=0", "train.precision=float16"])
    with pytest.raises(ConfigError, match='LBFGS adds up .* found train.precision = "float16", whose steps may be left out; '
                                          'set it to "float32", or another optimizer.name'):
        check_model(config, Grid({"dp": 1}), Facts(1, 8, closure="LBFGS"))
