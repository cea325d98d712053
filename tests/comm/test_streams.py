"""Output that nobody reads to its end (`mpitrain inspect RUN | head -1`), or that cannot be written (`> FILE` on a full disk)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import clean_environment

from mpitrain.checkpoint import store
from mpitrain.checkpoint.run_folder import RunFolder

VERBS = [("inspect", "{run}/config.toml"), ("checkpoint", "list", "{run}"), ("checkpoint", "verify", "{run}"),
         ("data", "info", "digits"), ("inspect", "--help")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = RunFolder(tmp_path_factory.mktemp("run")).open()
    folder.write_text(folder.config, '[model]\nname = "mlp"\ninputs = 64\nhidden = [8]\noutputs = 10\n'
                                     '[data]\npath = "digits"\n[train]\nsteps = 3\nbatch_size = 48\n')
    for step in range(1, 9):
        store.save(folder.checkpoints, step, [store.Piece.whole("w", np.ones(3))], {})
    folder.close()
    return folder.path


def start(run: Path, verb: tuple[str, ...], unbuffered: str, stdout: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpitrain", *(word.format(run=run) for word in verb)]
    environment = {**clean_environment(), "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=environment, cwd=run, text=True)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_reader_that_leaves_ends_a_verb_quietly(run: Path, verb: tuple[str, ...], unbuffered: str) -> None:
    """A pipe without a reader from the start: each line that is written fails; unbuffered, the first one does so at once."""
    result = start(run, verb, unbuffered, writing := no_reader())
    os.close(writing)
    assert result.stderr == "" and result.returncode in (0, 141), result


def test_a_reader_that_leaves_an_evaluation_is_no_lost_rank(run: Path, tmp_path: Path) -> None:
    """Unlike the verbs above it is watched, and the watcher is told of its end."""
    command = [sys.executable, "-m", "mpitrain"]
    environment = {**clean_environment(), "PYTHONUNBUFFERED": "1"}
    subprocess.run([*command, "train", "train.steps=2", "run.out=own", "--quiet"], cwd=tmp_path, env=environment, check=True)
    result = start(tmp_path / "own", ("evaluate", "{run}"), "1", closed := no_reader())
    os.close(closed)
    assert result.returncode == 141 and "mpitrain:" not in result.stderr, result


def no_reader() -> int:
    """A pipe that nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("verb", VERBS[:-1])
def test_output_that_cannot_be_written_is_one_line_that_names_it(run: Path, verb: tuple[str, ...], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        result = start(run, verb, unbuffered, full)
    assert result.returncode == 74, result
    assert re.fullmatch(r'mpitrain: E_IO rank=0/1 host=\S+ file="standard output": No space left on device\n', result.stderr)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_run_whose_display_cannot_be_written_is_done_all_the_same(run: Path, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        result = start(run, ("train", "train.steps=2", f"run.out=shown{unbuffered}"), unbuffered, full)
    assert result.returncode == 0 and "rror" not in result.stderr, result
    assert '"status": "done"' in (run / f"shown{unbuffered}/run.json").read_text()
