"""The worked examples reach their figures, each with one seed; `benchmarks/examples.py` runs more. Minutes: `make test-slow`.

Runs of ten minutes each are left out unless MPITRAIN_LONG_EXAMPLES is set.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from launch import Job  # noqa: E402
from test_examples import stand_ins  # noqa: E402

import examples  # noqa: E402

pytestmark = pytest.mark.slow

FIGURES = list(examples.figures())


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where examples that share data find what the first of them has made."""
    return tmp_path_factory.mktemp("work")


def prepared(figure: examples.Figure, work: Path) -> None:
    """The example's data is in `work`; else the test is skipped for what is missing."""
    status, said = examples.prepare(figure, work)
    if status == 66:
        pytest.skip(said)
    assert status == 0, said


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_an_example_reaches_its_figure(figure: examples.Figure, work: Path) -> None:
    if figure.long and not os.environ.get("MPITRAIN_LONG_EXAMPLES"):
        pytest.skip("MPITRAIN_LONG_EXAMPLES is not set, without which runs of more than a minute are left out")
    prepared(figure, work)
    found, _ = examples.reached(figure, work, 0, figure.ranks)
    assert figure.holds(found), f"{figure.metric} {found}, and {figure.bar} was expected"


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_the_batch_script_runs_an_example(figure: examples.Figure, work: Path, tmp_path: Path) -> None:
    """Two steps and an evaluation on 2 ranks, with stand-ins for Slurm's commands."""
    prepared(figure, work)
    few = ("train.steps=2", "optimizer.warmup_steps=0", "log.every=1")
    script = ROOT / "examples/slurm/train.sbatch"
    command = ["bash", str(script), str(work / figure.example / figure.config), *few]
    done = Job(command, {**stand_ins(tmp_path), "EPOCHS": "0"}, tmp_path).finish()
    assert done.rc == 0 and "2 ranks" in done.out, done.out + done.err
    assert [line["step"] for line in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())] == [1, 2, 2]
