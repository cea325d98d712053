"""`mpitrain bench memory`: what is predicted is what ranks take, in every way that so many ranks can train a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from launch import mpirun

from mpitrain.backend import native
from mpitrain.bench.footprint import BAR, SMALLEST, SMALLEST_POOL, ratio, ways

TINY = """
import sys
from mpitrain import nn
from mpitrain.bench.workloads import WORKLOADS, Workload, transformer
from mpitrain.cli import main
from mpitrain.comm.job.guard import Process
def net():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                         nn.Dropout(0.1), nn.Linear(512, 10))
WORKLOADS.register("net")(Workload(net, 64, (1, 16, 16), 10, 1))
WORKLOADS.register("tiny-gpt")(transformer(2, 2, 48, 32, 65, batch=16))
Process().run(lambda: main(["bench", "memory", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("n", range(1, 9))
def test_every_way_is_a_mesh_of_all_ranks(n: int) -> None:
    for name, grid, _ in ways(n, planned=True):
        assert np.prod([grid.size(axis) for axis in ("pp", "dp", "cp", "ep", "tp")]) == n, name
        assert (grid.size("pp"), grid.size("tp")) == (2 if name.startswith("pp=2") else 1, 2 if name == "tp=2" else 1)


@pytest.mark.skipif(native.compiler() is None, reason="no C compiler")
@pytest.mark.parametrize(("n", "models"), [(1, "net,tiny-gpt"), pytest.param(2, "tiny-gpt", marks=pytest.mark.slow)])
def test_predicted_is_measured(n: int, models: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TINY)
    result = mpirun(n, program, "--models", models, "--json", "r.json", cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert result.rc == 0 and result.error_lines == [], result.err
    records = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    names = [name for name, *_ in ways(n, planned=True)]
    assert {(r["model"], r["way"], r["recompute"]) for r in records} == {
        (model, way, recompute) for model in models.split(",") for way in names for recompute in (False, True)}
    for r in records:
        said, had = r["predicted"], r["measured"]
        assert had["activations"] > SMALLEST / 4 and had["pool"] > sum(had[key] for key in list(had)[:3])
        exact = r["way"].startswith(("pp", "one", "4"))       # slices, and classes over tp, need not be equal
        for key in ("parameters", "gradients", "optimizer"):
            assert said[key] == pytest.approx(had[key], rel=0 if exact else 0.05), (r["way"], key)
        assert said["activations"] == pytest.approx(had["activations"], rel=BAR), (r["model"], r["way"], r["recompute"])
    by = {(r["way"], r["recompute"], r["stage"]): r["measured"] for r in records if r["model"] == "tiny-gpt"}
    way = names[0]
    assert by[way, True, 0]["activations"] < 0.7 * by[way, False, 0]["activations"]
    if n == 2:                                                # what is in flight on each stage is what differs
        assert by["pp=2 1f1b", False, 0]["activations"] < 0.7 * by["pp=2 gpipe", False, 0]["activations"]
        assert by["pp=2 1f1b", False, 1]["activations"] < 0.7 * by["pp=2 1f1b", False, 0]["activations"]
    assert "furthest apart: " in result.out and "(bar 15%)" in result.out


def test_little_is_not_compared() -> None:
    assert ratio("gradients", 3 * SMALLEST, 2 * SMALLEST) == 1.5 and ratio("gradients", 5, SMALLEST - 1) is None
    assert ratio("pool", SMALLEST, SMALLEST) is None and ratio("pool", SMALLEST_POOL, SMALLEST_POOL) == 1.0
    assert ratio("activations", None, SMALLEST) is None
