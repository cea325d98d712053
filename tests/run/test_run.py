"""Runs as objects: several in one process, after each other or side by side, each with the bits of a process of its own."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from launch import ROOT, mpirun
from runs import SMALL, record, train, write

from mpitrain import Process, Run, load_config, start
from mpitrain.errors import ConfigError

PROGRAM = """
import json
from pathlib import Path

from mpitrain import MpitrainError, Process, Run, SavedRun, load_config, start

process, world = Process(), start().comm


def one(comm, name, *overrides):
    config = load_config(Path("run.toml"), [f"run.out={name}", *overrides])
    run, saved = Run(config, comm, process=process, quiet=True), SavedRun(config, comm, process=process)
    try:
        trained = run.train()
        found = [trained.hashes, trained.metrics, saved.evaluate(Path(name)).metrics]
    except MpitrainError as error:
        found = [type(error).__name__, error.message]
    run.close()
    saved.close()
    if comm.rank == 0:
        Path(f"{name}.json").write_text(json.dumps(found))


def main():
    BODY
    return 0


process.run(main)
"""
SHORT = SMALL.replace("steps = 50", "steps = 8").replace("eval_every = 25", "eval_every = 4")
FIRST = ("run.seed=3", "train.micro_batches=4")
SECOND = ("model.hidden=[24]", "comm.sharding=gradients", "train.batch_size=32")


def run_program(n, folder, *body):
    write(folder, SHORT)
    (folder / "program.py").write_text(PROGRAM.replace("BODY", "\n    ".join(body)))
    return mpirun(n, folder / "program.py", cwd=folder, timeout=120)


def found(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def alone(n, folder, name, *overrides):
    """The hashes of a run in processes of its own."""
    config = write(folder, SHORT)
    assert train(n, config, f"run.out={name}", "--quiet", *overrides).rc == 0
    return {key: record(folder / name)[key] for key in ("parameters_sha256", "buffers_sha256")}


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.promise("D4")
def test_runs_one_after_another_have_the_bits_of_separate_processes(tmp_path, n):
    result = run_program(n, tmp_path, f"one(world, 'a', *{FIRST})", f"one(world, 'b', *{SECOND})", f"one(world, 'c', *{FIRST})")
    assert result.rc == 0, result.err
    (hashes, metrics, evaluated), b, c = (found(tmp_path, name) for name in "abc")
    assert hashes == c[0] == alone(n, tmp_path, "d", *FIRST) and metrics == evaluated
    assert b[0] == alone(n, tmp_path, "e", *SECOND)
    assert len((tmp_path / "a/metrics.jsonl").read_text().splitlines()) == 10


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_runs_side_by_side_have_the_bits_of_runs_alone(tmp_path, n):
    result = run_program(n, tmp_path, f"half = world.rank // {n // 2}", "part = world.Split(half, world.rank)",
                         f"one(part, *(('a', *{FIRST}), ('b', *{SECOND}))[half])")
    assert result.rc == 0, result.err
    assert found(tmp_path, "a")[0] == alone(n // 2, tmp_path, "c", *FIRST)
    assert found(tmp_path, "b")[0] == alone(n // 2, tmp_path, "d", *SECOND)


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_run_that_fails_alike_leaves_the_others_alone(tmp_path, n):
    result = run_program(n, tmp_path, f"half = world.rank // {n // 2}", "part = world.Split(half, world.rank)",
                         f"one(part, *(('a', *{FIRST}), ('b', 'optimizer.name=adamx'))[half])",
                         f"one(part, *(('c', *{FIRST}), ('d', *{FIRST}))[half])")
    assert result.rc == 0 and result.error_lines == [], result.err
    error, message = found(tmp_path, "b")
    assert error == "ConfigError" and 'unknown optimizer "adamx"' in message
    assert found(tmp_path, "a")[0] == found(tmp_path, "c")[0] == found(tmp_path, "d")[0]


@pytest.mark.promise("A1")
def test_an_error_of_one_rank_ends_the_job_though_the_program_would_go_on(tmp_path):
    (tmp_path / "own.py").write_text("""
from mpitrain.errors import DataError
from mpitrain.train import Observer


class Faulty(Observer):
    def begin(self, run):
        self.rank = run.rank

    def after_step(self, step, fields, seconds):
        if step == 3 and self.rank == 1:
            raise DataError("the meter is not there")
""")
    result = run_program(4, tmp_path, "half = world.rank // 2", "part = world.Split(half, world.rank)",
                         "one(part, 'ab'[half], *(['log.observers=own.py:Faulty', 'train.steps=100000'][1 - half:]))")
    assert result.rc == 65 and len(result.error_lines) == 1, result.err
    assert "rank=3/4" in result.error_lines[0] and "the meter is not there" in result.error_lines[0]
    assert "the meter is not there" in json.loads((tmp_path / "b/errors/rank-3.json").read_text())["traceback"]
    assert not (tmp_path / "a/errors").exists()


def test_a_run_changes_no_setting_of_the_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = np.geterr()
    with Run(load_config(write(tmp_path, SHORT), ["run.out=a"]), start().comm, quiet=True) as run:
        assert run.train().steps == 8
    assert np.geterr() == before


OBSERVER = """
from mpitrain.train import Observer


class Faulty(Observer):
    def begin(self, run):
        self.rank = run.rank

    def after_step(self, step, fields, seconds):
        if self.rank == 1:
            raise ValueError("the meter is not there")
"""


@pytest.mark.parametrize(("where", "place"), [("observer", "in after_step"), ("block", "in <module>")])
@pytest.mark.promise("A1")
def test_the_lines_of_the_readme_end_the_job_when_one_rank_fails(tmp_path, where, place):
    (tmp_path / "own.py").write_text(OBSERVER)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program = next(block for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
                   if "with Run(" in block)
    program = program.replace('"train.epochs=2"', f'"train.epochs=2", "log.observers={tmp_path}/own.py:Faulty"') \
        if where == "observer" else program.replace("    print(", "    print(1 // (1 - run.comm.rank), ")
    (tmp_path / "program.py").write_text(program)
    result = mpirun(2, tmp_path / "program.py", cwd=tmp_path)
    assert result.rc == 70 and len(result.error_lines) == 1 and result.seconds < 30, result.err
    assert "E_USER rank=1/2" in result.error_lines[0] and place in result.error_lines[0]


def test_symmetric_errors_are_raised_in_a_program_that_nothing_guards(tmp_path):
    write(tmp_path, SHORT)
    (tmp_path / "program.py").write_text("""
from pathlib import Path
from mpitrain import Run, load_config, start
from mpitrain.errors import ConfigError

with Run(load_config(Path("run.toml"), ["optimizer.name=adamx", "run.out=a"]), start().comm) as run:
    try:
        run.train()
    except ConfigError as error:
        print("raised", flush=True)
""")
    result = mpirun(2, tmp_path / "program.py", cwd=tmp_path)
    assert result.rc == 0 and result.out.split().count("raised") == 2, result.err


def test_a_run_is_closed_once_and_not_used_afterwards(tmp_path):
    write(tmp_path, SHORT)
    (tmp_path / "program.py").write_text("""
from pathlib import Path
from mpi4py import MPI
from mpitrain import Run, SavedRun, load_config, start
from mpitrain.errors import UsageError

config, comm = load_config(Path("run.toml"), ["run.out=a", "train.steps=2"]), start().comm


def refused(action, text):
    try:
        action()
    except UsageError as error:
        assert text in error.message, error.message
    else:
        raise AssertionError(text)


for wrong in (None, MPI.COMM_NULL, start()):
    refused(lambda: Run(config, wrong), "needs the communicator of its ranks")
with Run(config, comm, quiet=True) as run:
    run.train()
    run.close()
run.close()
refused(run.train, "this run is closed")
with SavedRun(config, comm) as saved:
    assert saved.evaluate(Path("a")).step == 2
refused(lambda: saved.evaluate(Path("a")), "this run is closed; make another one: SavedRun(config, comm)")
Run(config, comm).close()
""")
    result = mpirun(2, tmp_path / "program.py", cwd=tmp_path)
    assert result.rc == 0, result.err


def test_what_a_lone_rank_meets_is_raised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run(load_config(write(tmp_path, SHORT), ["run.out=a", "optimizer.name=adamx"]), start().comm, process=Process())
    with pytest.raises(ConfigError, match='unknown optimizer "adamx"'):
        run.train()
    run.close()
