"""Output that nobody reads to its end: `mpitrain inspect RUN | head -1`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, clean_environment

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


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_reader_that_leaves_ends_a_verb_quietly(run: Path, verb: tuple[str, ...], unbuffered: str) -> None:
    """A pipe without a reader from the start: each line that is written fails; unbuffered, the first one does so at once."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "mpitrain", *(word.format(run=run) for word in verb)]
    environment = {**clean_environment(), "PYTHONUNBUFFERED": unbuffered}
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment, cwd=ROOT, text=True)
    os.close(writing)
    assert result.stderr == "" and result.returncode in (0, 141), result
