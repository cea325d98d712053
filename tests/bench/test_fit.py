"""The fit finds a machine it is shown, and the command prints what it predicts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standing import mpirun

from mpitrain.bench.fit import ALGORITHMS, Costs, Point, fit, in_c, predicted
from mpitrain.schedules.fit import non_negative


@settings(max_examples=8, deadline=None)
@given(st.floats(1e-7, 1e-4), st.floats(1e-11, 1e-8), st.floats(1e-11, 1e-8), st.sampled_from([3, 4, 8]))
def test_a_fit_finds_the_machine_behind_exact_times(alpha: float, beta: float, gamma: float, n: int) -> None:
    machine = Costs(alpha, beta, gamma)
    points = [Point(name, size, predicted(name, size, n, machine), True)
              for name in ALGORITHMS for size in (1 << 10, 1 << 16, 1 << 24)]
    found = fit(points, n)
    for point in points:
        assert predicted(point.algorithm, point.nbytes, n, found) == pytest.approx(point.seconds, rel=1e-6)
    assert found.alpha == pytest.approx(alpha, rel=1e-3)


def test_python_s_part_of_a_collective_and_of_a_message_is_found_where_c_runs_some_of_them() -> None:
    """A machine as two ranks here are: messages of 1 us, of which Python makes 9, and 12 us for each collective that it runs."""
    machine = Costs(1e-6, 2e-10, 1e-10, collective_s=12e-6, message_s=8e-6)
    sizes = [1 << k for k in range(10, 24)]
    points = [Point(name, size, predicted(name, size, 2, machine), True) for name in ALGORITHMS for size in sizes]
    assert sum(in_c(point.algorithm, point.nbytes, 2) for point in points) == 7            # 1 KiB to 64 KiB
    found = fit(points, 2)
    for point in points:
        assert predicted(point.algorithm, point.nbytes, 2, found) == pytest.approx(point.seconds, rel=1e-6)
    assert tuple(found) == pytest.approx(tuple(machine), rel=1e-3)


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
    machine = Costs(*(record[key] for key in Costs._fields))
    for p in record["points"]:
        assert math.isclose(p["predicted_seconds"], predicted(p["algorithm"], p["bytes"], 2, machine)) and p["seconds"] > 0
    assert result.out.count("not in the fit") == len(ALGORITHMS) and "predicted" in result.out


@pytest.mark.parametrize(("arguments", "message"), [(["--sizes", "8,16"], "the number of --sizes to fit must be at least 3"),
                                                    (["--sizes", "8,16,18"], "no whole number of float32")])
def test_a_mistake_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = mpirun(2, "-m", "mpitrain", "bench", "fit", *arguments, cwd=tmp_path)
    assert result.rc == 64 and len(result.error_lines) == 1 and message in result.error_lines[0], result.err
