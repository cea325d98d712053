"""Every mesh of 1 to 8 ranks with every schedule, and a run from the command line that cuts layers."""

from __future__ import annotations

import json
import os

import pytest
from launch import ROOT
from standing import mpirun

PYTEST = ("-m", "pytest", "-q", "-x", "-p", "pytest_mpi", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--with-mpi",
          "--timeout=1800")
PLAN = 'mesh.plan={linear0 = "column", linear1 = "row", head = "vocabulary"}'
CONFIG = """
model = {name = "mlp", inputs = 64, hidden = [32, 32], outputs = 10}
data = {path = "digits", transform = ["standardise"]}
train = {steps = 20, batch_size = 48, eval_every = 10}
checkpoint = {every = 10}
log = {every = 1}
"""


RANKS = [4, *([1, 2, 6, 8] if os.environ.get("MPITRAIN_EVERY_MESH") else [])]       # all: make mesh-matrix, half an hour


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n", RANKS)
@pytest.mark.promise("D5", "D7")
def test_every_mesh_is_as_one_rank(n, tmp_path):
    """Losses with every schedule, checkpoints on every other mesh, and in layout mode the bits."""
    result = mpirun(n, *PYTEST, ROOT / "tests/parallel/mesh_mpi.py", "-k", "every_mesh or checkpoint or layout_mode",
                    timeout=3500, cwd=ROOT, env={"PYTEST_DEBUG_TEMPROOT": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                                                     "MPITRAIN_EVERY_MESH": "1", "MPITRAIN_TEST_LIMIT": "1800"})
    assert result.rc == 0, result.out[-6000:] + result.err[-6000:]


def test_a_plan_on_the_command_line_cuts_a_run_that_one_rank_resumes(tmp_path):
    """Its logits are cut unevenly, 10 over 4 ranks; metrics go on as those of one rank all the way."""
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    steps = {}
    for out, *runs in (("whole", (1, ())), ("cut", (4, ("mesh.tp=4", PLAN, "train.steps=10")), (1, ("--resume",)))):
        for n, arguments in runs:
            result = mpirun(n, "-m", "mpitrain", "train", config, f"run.out={out}", "optimizer.schedule=constant", *arguments,
                            cwd=tmp_path)
            assert result.rc == 0, result.err
        lines = [json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        steps[out] = [(line["step"], line["loss"], line.get("accuracy", 0)) for line in lines]
    assert len(steps["whole"]) == 22
    result = mpirun(2, "-m", "mpitrain", "evaluate", "cut", "mesh.tp=2", cwd=tmp_path)
    assert json.loads(result.out)["loss"] == pytest.approx(steps["whole"][-1][1], rel=1e-5)
    for found, expected in zip(steps["cut"], steps["whole"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("n", "arguments", "message"), [
    (3, ("mesh.tp=3",), 'mesh.tp = 3 does not divide the 32 outputs of "linear0"; the nearest that fits the whole model:'),
    (2, ("mesh.tp=2", "optimizer.name=lars"), 'LARS needs norms of whole parameters, and mesh.tp = 2 cuts "linear0.weight"; set'),
])
def test_what_cannot_be_cut_ends_the_run_with_one_line(n, arguments, message, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    result = mpirun(n, "-m", "mpitrain", "train", config, *arguments, cwd=tmp_path)
    line, = result.error_lines
    assert message in line and result.rc == 78 and not (tmp_path / "runs").exists()
