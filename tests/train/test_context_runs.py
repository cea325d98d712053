"""Runs with mesh.cp as a user starts them: trained, evaluated, and told what is wrong in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from runs import lines, write
from standing import mpirun, train

GPT = """
[model]
name = "gpt"
layers = 2
heads = 2
width = 16
block = 32
vocabulary = 12
dropout = 0.1
[data]
path = "words"
validation = "tail:0.2"
[train]
steps = 6
batch_size = 8
micro_batches = 4
[log]
every = 1
"""


@pytest.mark.slow
def test_a_run_whose_samples_are_shared_has_the_metrics_of_one_rank_and_is_evaluated(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("the quick fish, the slow fish. " * 80)
    assert mpirun(1, "-m", "mpitrain", "data", "import", "text", "words.txt", "--out", "words", cwd=tmp_path).rc == 0
    vocabulary = len(set((tmp_path / "words.txt").read_text()))
    config = write(tmp_path, GPT.replace("vocabulary = 12", f"vocabulary = {vocabulary}"))
    found = {}
    for n, arguments in ((1, ()), (2, ("mesh.cp=2", "comm.bucket_mb=auto", "comm.progress=auto"))):
        result = train(n, config, *arguments, f"run.out=run{n}")
        assert result.rc == 0, result.out + result.err
        found[n] = [line["loss"] for line in lines(tmp_path / f"run{n}")]
        told = mpirun(n, "-m", "mpitrain", "evaluate", f"run{n}", cwd=tmp_path)
        assert told.rc == 0, told.out + told.err
        found[n] += [json.loads(told.out.splitlines()[-1])[name] for name in ("loss", "accuracy")]
    assert len(found[1]) > 8
    np.testing.assert_allclose(found[2], found[1], rtol=1e-5)
    result = train(2, config, "mesh.cp=2", "model.block=30", "run.out=none")
    assert result.rc == 78 and len(result.error_lines) == 1, result.err
    assert "mesh.cp = 2 cuts the positions of samples into 4 chunks, and theirs are 30" in result.error_lines[0]
    assert "the nearest that fits: 28 or 32 positions (model.block), or mesh.cp = 1" in result.error_lines[0]
