"""The worked examples reach their figures, each with one seed; `benchmarks/examples.py` runs more. Minutes: `make test-slow`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import examples  # noqa: E402

pytestmark = pytest.mark.slow

FIGURES = list(examples.figures())


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where examples that share data find what the first of them has made."""
    return tmp_path_factory.mktemp("work")


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_an_example_reaches_its_figure(figure: examples.Figure, work: Path) -> None:
    status, said = examples.prepare(figure.example, work)
    if status == 66:
        pytest.skip(said)
    assert status == 0, said
    found, _ = examples.reached(figure, work, 0, figure.ranks)
    assert figure.holds(found), f"{figure.metric} {found}, and {figure.bar} was expected"
