"""The fit finds a machine it is shown, and its predictions follow from the schedules' own steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import mpirun

from mpitrain.bench.fit import ALGORITHMS, Point, fit, non_negative, predicted
from mpitrain.bench.model import Machine, simulate
from mpitrain.errors import ConfigError
from mpitrain.schedules.collectives import ALL_REDUCE
from mpitrain.schedules.steps import Reduce, Send


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 12])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_prediction_counts_the_messages_and_sums_of_the_schedule(name: str, n: int) -> None:
    """On the busiest rank: one alpha a round with messages, and as much beta and gamma as it sends or receives, and adds."""
    length, itemsize = 120 * n, 4
    cost = {"alpha": 0, "beta": 0, "gamma": 0}
    for rank in range(n):
        rounds = list(ALL_REDUCE[name](rank, n, length))
        messages = [[step for step in round_ if not isinstance(step, Reduce)] for round_ in rounds]
        longest = [max((step[1].length for step in steps), default=0) for steps in messages]
        own = {"alpha": sum(1 for m in longest if m), "beta": sum(longest) * itemsize,
               "gamma": sum(s.into.length for r in rounds for s in r if isinstance(s, Reduce)) * itemsize}
        assert any(isinstance(step, Send) for steps in messages for step in steps) == (n > 1)
        cost = {key: max(cost[key], own[key]) for key in cost}
    for key, value in cost.items():
        unit = Machine(**{**dict.fromkeys(cost, 0.0), key: 1.0})
        assert simulate(ALL_REDUCE[name], n, length, itemsize, unit) == pytest.approx(value)


def test_an_algorithm_of_unknown_cost_is_refused() -> None:
    with pytest.raises(ConfigError, match="no cost is known"):
        simulate(lambda rank, n, length: iter([]), 2, 8, 4, Machine(1.0, 1.0, 1.0))


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-7, 1e-4), st.floats(1e-11, 1e-8), st.floats(1e-11, 1e-8), st.sampled_from([3, 4, 8]))
def test_a_fit_finds_the_machine_behind_exact_times(alpha: float, beta: float, gamma: float, n: int) -> None:
    machine = Machine(alpha, beta, gamma)
    points = [Point(name, size, predicted(name, size, n, machine), True)
              for name in ALGORITHMS for size in (1 << 10, 1 << 16, 1 << 24)]
    found = fit(points, n)
    for point in points:
        assert predicted(point.algorithm, point.nbytes, n, found) == pytest.approx(point.seconds, rel=1e-6)
    assert found.alpha == pytest.approx(alpha, rel=1e-3)


def test_no_number_is_negative_and_the_rest_fits_without_it() -> None:
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative(rows, np.array([3.0, 2.0, 1.0]))[1] == 0.0
    assert np.linalg.lstsq(rows, np.array([3.0, 2.0, 1.0]), rcond=None)[0][1] < 0.0
    assert non_negative(rows, np.array([1.0, 2.0, 3.0])) == pytest.approx([0.0, 1.0])


def test_the_command_prints_predicted_beside_measured_and_marks_what_the_fit_has_not_seen(tmp_path: Path) -> None:
    result = mpirun(2, "-m", "mpitrain", "bench", "fit", "--sizes", "1K,32K,128K", "--pairs", "3", "--json", "f.json",
                    cwd=tmp_path)
    assert result.rc == 0, result.err
    record, = (json.loads(line) for line in (tmp_path / "f.json").read_text().splitlines())
    assert record["bench"] == "fit" and record["ranks"] == 2
    assert all(record[key] >= 0 for key in ("alpha", "beta", "gamma")) and record["direct"]["alpha"] > 0
    assert [(p["algorithm"], p["bytes"], p["fitted"]) for p in record["points"]] == [
        (name, size, seen) for name in ALGORITHMS for size, seen in ((1024, True), (32768, False), (131072, True))]
    machine = Machine(record["alpha"], record["beta"], record["gamma"])
    for p in record["points"]:
        assert math.isclose(p["predicted_seconds"], predicted(p["algorithm"], p["bytes"], 2, machine)) and p["seconds"] > 0
    assert result.out.count("not in the fit") == 2 and "predicted" in result.out


@pytest.mark.parametrize(("arguments", "message"), [(["--sizes", "8,16"], "the number of --sizes to fit must be at least 3"),
                                                    (["--sizes", "8,16,18"], "no whole number of float32")])
def test_a_mistake_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = mpirun(2, "-m", "mpitrain", "bench", "fit", *arguments, cwd=tmp_path)
    assert result.rc == 64 and len(result.error_lines) == 1 and message in result.error_lines[0], result.err
