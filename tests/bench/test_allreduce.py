"""`mpitrain bench allreduce` under mpirun: what it writes, and that it believes no result it has not checked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launch import Result, mpirun

from mpitrain.bench.allreduce import known

WRONG = Path(__file__).with_name("wrong.py")
FIELDS = ["bench", "algorithm", "bytes", "dtype", "ranks", "seconds", "mpi_seconds", "ratio"]


def bench(n: int, folder: Path, *arguments: str) -> Result:
    return mpirun(n, "-m", "mpitrain", "bench", "allreduce", *arguments, cwd=folder, timeout=120)


@pytest.mark.parametrize("n", [2, 3])
def test_each_algorithm_size_and_dtype_is_one_object(n: int, tmp_path: Path) -> None:
    result = bench(n, tmp_path, "--json", "r.json", "--sizes", "8,64K", "--dtypes", "float32,float64", "--pairs", "3")
    assert result.rc == 0 and result.error_lines == [], result.err
    records = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert [(r["algorithm"], r["dtype"], r["bytes"]) for r in records] == [
        (name, dtype, size) for name in known() for dtype in ("float32", "float64") for size in (8, 65536)]
    for r in records:
        assert list(r)[:8] == FIELDS
        assert r["bench"] == "allreduce" and r["ranks"] == n and r["pairs"] == 3
        assert r["seconds"] > 0 and r["mpi_seconds"] > 0
        assert r["mpi_seconds_low"] / r["seconds_high"] <= r["ratio"] <= r["mpi_seconds_high"] / r["seconds_low"]
        assert r["machine"]["hosts"] == 1 and "MPI" in r["machine"]["mpi_library"]
    table = result.out.splitlines()
    assert len(table) == 2 + len(records) and table[2].startswith("ring ") and "64 KiB" in result.out


def test_a_wrong_sum_ends_the_job_with_one_line(tmp_path: Path) -> None:
    result = bench(2, tmp_path, "--algorithms", f"{WRONG}:loses_a_part", "--sizes", "8,64K", "--pairs", "2")
    assert result.rc == 70 and len(result.error_lines) == 1, result.err
    assert "loses_a_part of 65536 bytes of float32 gave a wrong sum: element 16383 of 16384 is" in result.error_lines[0]
    assert " 8 B  float32" in result.out, "the small sums are right"


def test_one_rank_says_that_nothing_is_exchanged(tmp_path: Path) -> None:
    result = bench(1, tmp_path, "--json", "r.json")
    assert result.rc == 0 and "one rank has nothing to exchange" in result.out
    assert (tmp_path / "r.json").read_text() == ""


@pytest.mark.parametrize(("arguments", "rc", "message"), [
    (["--sizes", "8,many"], 64, 'E_USAGE .*found "many"'),
    (["--dtypes", "int3"], 64, "E_USAGE .*--dtypes knows no"),
    (["--algorithms", "rinf"], 64, "E_USAGE .*did you mean .ring."),
    (["--algorithms", "nowhere:f"], 78, "E_CONFIG .*no module nowhere"),
    (["--pairs", "0"], 64, "E_USAGE .*--pairs must be at least 1"),
    (["--pairs", "x"], 64, "E_USAGE .*--pairs"),
    (["--sizes", "12", "--dtypes", "float64"], 64, "E_USAGE .*no whole number of float64"),
    (["--speed"], 64, "E_USAGE .*unknown argument --speed"),
    (["--json", "no/such/folder.json"], 66, "E_MISSING .*No such file"),
])
def test_a_mistake_is_one_line_on_all_ranks(arguments: list[str], rc: int, message: str, tmp_path: Path) -> None:
    result = bench(2, tmp_path, *arguments)
    assert result.rc == rc and len(result.error_lines) == 1, result.err
    assert re.search(message, result.error_lines[0]), result.error_lines
