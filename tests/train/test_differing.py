"""A user's model that differs by rank apart from its parameters, whose digests cannot show it, is named before it trains."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from launch import Result
from runs import SMALL, train, write

OURS = 'name = "mlp"\ninputs = 64\nhidden = [32]\noutputs = 10'


def run(tmp_path: Path, kind: str, n: int = 3) -> Result:
    shutil.copy(Path(__file__).with_name("differing.py"), tmp_path)
    config = write(tmp_path, SMALL.replace(OURS, 'name = "differing.py:Net"'))
    return train(n, config, "train.steps=4", "run.out=a", env={"DIFFERS": kind})


@pytest.mark.promise("D2")
def test_a_model_that_is_another_function_on_one_rank_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path, "rank")
    assert result.rc == 76 and len(result.error_lines) == 1, result.err
    assert "E_DESYNC" in result.err and "gives another output for one sample and equal parameters on rank 1" in result.err
    assert "differing.py:Net" in result.err and not list((tmp_path / "a").glob("checkpoints/*"))


@pytest.mark.promise("D2")
@pytest.mark.parametrize("n", [1, 2])
def test_a_model_that_draws_numbers_of_its_own_is_told(tmp_path: Path, n: int) -> None:
    result = run(tmp_path, "pass", n)
    assert result.rc == 0 and result.out.count("at each pass") == 1, result.out


@pytest.mark.promise("D2")
def test_the_same_model_on_all_ranks_is_left_alone(tmp_path: Path) -> None:
    result = run(tmp_path, "")
    assert result.rc == 0 and "at each pass" not in result.out + result.err
