"""The scripts of benchmarks/ that start ranks: each runs to its end on a small problem and writes what it found."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from launch import ROOT, Job, clean_environment, find_mpirun

from mpitrain.data import write_shards

pytestmark = pytest.mark.slow
TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed (make bench-comm installs it)")


def run(folder: Path, ranks: int, script: str, *arguments: str) -> tuple[list[dict], str]:
    """The records and the output of a script, under mpirun unless it starts the ranks itself (ranks = 0)."""
    launcher = [find_mpirun(), "-n", str(ranks)] if ranks else []
    job = Job([*launcher, sys.executable, str(ROOT / "benchmarks" / script), *arguments, "--json", "r.json"],
              {k: v for k, v in clean_environment().items() if not k.startswith("OPENBLAS_")}, folder)
    result = job.finish(120)
    assert result.rc == 0, result.out + result.err
    return [json.loads(line) for line in (folder / "r.json").read_text().splitlines()], result.out


def test_the_memory_of_a_node_is_that_of_its_arrays(tmp_path: Path) -> None:
    """Replicated: 16 bytes a parameter on each rank, and not much besides; with one copy a node, (12 + 4 n) / (16 n) of that."""
    records, out = run(tmp_path, 0, "node_memory.py", "--ranks", "2", "--parameters", "4000000")
    found = {record["policy"]: record for record in records}
    for record in records:
        assert record["ranks"] == 2 and record["model_bytes"] == record["after_bytes"] - record["before_bytes"]
    assert 0.95 <= found["replicated"]["ratio"] <= 1.3 and 0.6 <= found["node_shared"]["ratio"] <= 0.75
    measured = {name: record["model_bytes"] / found["replicated"]["model_bytes"] for name, record in found.items()}
    assert found["node_shared"]["to_replicated"] == measured["node_shared"] < 0.8 and found["replicated"]["to_replicated"] == 1.0
    assert f"{measured['node_shared']:.3f} of replicated, measured" in out


def test_what_measuring_energy_takes_of_a_step(tmp_path: Path) -> None:
    """Few pairs, whose ratios mean nothing on a machine that others use; what the parts take is held against the bar."""
    records, out = run(tmp_path, 2, "energy_cost.py", "--models", "mlp,gpt-nano", "--pairs", "2", "--seconds", "0.05")
    assert [record["model"] for record in records] == ["mlp", "gpt-nano"] and out.count(" of a step") == 2
    for record in records:
        assert record["time"]["ratio"] > 0 and record["cpu"]["ratio"] > 0 and record["parts"]["spans"] >= 6
        assert 0 < record["parts"]["share"] < 0.005


def test_bytes_of_a_rank_are_those_of_the_formula(tmp_path: Path) -> None:
    records, out = run(tmp_path, 0, "sharding_bytes.py", "--ranks", "2", "8", "--width", "192", "--layers", "2")
    assert [record["kind"] for record in records[:4]] == ["none", "optimizer", "gradients", "parameters"] and len(records) == 16
    assert [record["node_shared"] for record in records[:8]] == [False] * 4 + [True] * 4
    assert all(0.98 <= record["ratio"] <= 1.02 for record in records) and "% from the formula (limit 2 %)" in out


def test_ranks_with_slices_train_a_larger_model_than_one(tmp_path: Path) -> None:
    """A small limit, where blocks and buckets weigh more: the bar is for the benchmark's own."""
    records, out = run(tmp_path, 0, "largest_model.py", "--limit-mb", "40", "--width", "128", "--ranks", "2", "--bar", "1.4")
    tried = [record for record in records if "grown_bytes" in record]
    assert {record["way"] for record in tried} == {"plain", "sharded"}
    assert records[-1]["ratio"] >= 1.4 and f"{records[-1]['ratio']:.2f} times as many (bar 1.4)" in out


def test_ranks_that_share_a_sample_have_less_of_it(tmp_path: Path) -> None:
    """Two short samples, where what travels and what is no activation weigh more."""
    records, out = run(tmp_path, 0, "long_sequences.py", "--length", "512", "--ranks", "1", "2", "--layers", "4")
    assert [(record["ranks"], record["length"]) for record in records] == [(1, 512), (2, 512), (1, 256), (2, 512)]
    one, two, half, _ = (record["grown_bytes"] for record in records)
    assert 1.5 <= one / two <= 2.2 and two <= 1.3 * half and "times fewer bytes" in out


def test_the_price_of_layout_is_printed_for_each_model(tmp_path: Path) -> None:
    records, out = run(tmp_path, 0, "layout_cost.py", "--micro", "4", "--pairs", "2", "--model", "mlp")
    assert [(record["model"], record["ranks"], record["pairs"]) for record in records] == [("mlp", 2, 2)] * 2
    number = r"[+-]?[\d.]+"
    for what in ('mlp, 2 ranks, 4 micro-batches, "run" -> "layout"', 'mlp, 2 ranks, "run", 2 -> 4 micro-batches'):
        assert re.search(rf"^{what}: {number} ms -> {number} ms a step, {number} % \(quartiles {number} % to {number} %\)$",
                         out, re.M), out


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each rank needs a core of its own")
def test_weak_scaling_times_one_rank_alone_and_all_together(tmp_path: Path) -> None:
    records, out = run(tmp_path, 2, "weak_scaling.py", "--models", "gpt", "--pairs", "1", "--steps", "1")
    record, = records
    assert record["model"] == "gpt" and record["ranks"] == 2
    assert record["ratio"] == pytest.approx(record["alone_seconds"] / record["seconds"])
    assert "alone / together" in out


@TORCH
def test_gloo_is_measured_beside_ours(tmp_path: Path) -> None:
    records, out = run(tmp_path, 2, "allreduce_vs_gloo.py", "--sizes", "4K,64K", "--pairs", "1")
    assert [(r["bytes"], r["algorithm"]) for r in records] == [(4096, "shared"), (65536, "shared")]
    for record in records:
        assert record["ratio"] == pytest.approx(record["gloo_seconds"] / record["seconds"])


@TORCH
def test_distributed_data_parallel_is_measured_beside_ours(tmp_path: Path) -> None:
    (record,), out = run(tmp_path, 2, "exchange_vs_ddp.py", "--parameters", "300000", "--pairs", "1")
    assert record["algorithm"] == "node_shared" and record["parameters"] == 300000
    assert record["torch_seconds"] == pytest.approx(record["torch_backward_and_step_seconds"]
                                                    - record["torch_local_backward_seconds"])
    assert "DistributedDataParallel" in out


@TORCH
def test_the_first_step_is_timed_from_the_command_on(tmp_path: Path) -> None:
    records, out = run(tmp_path, 0, "first_step.py", "--rounds", "1")
    assert [record["model"] for record in records] == ["gpt", "mlp"]
    for record in records:
        assert record["ratio"] == pytest.approx(record["torch_seconds"] / record["seconds"])
        assert f"{record['model']}, from the command to the first step, 1 pairs" in out


@TORCH
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each rank needs a core of its own")
def test_a_pipeline_beside_pytorchs_is_compared_and_timed(tmp_path: Path) -> None:
    records, out = run(tmp_path, 2, "pipeline_vs_torch.py", "--models", "lenet-3,4x8x6", "--micro-batches", "4", "--pairs", "2")
    assert [(r["model"], r["schedule"], r["pairs"]) for r in records] == [
        (model, schedule, 2) for model in ("lenet-3", "4x8x6") for schedule in ("1f1b", "gpipe")]
    assert all(r["ratio"] > 0 and r["torch_seconds"] > 0 for r in records) and "times faster" in out


@TORCH
@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed (pip install --no-deps torchvision)")
def test_efficient_nets_beside_torchvisions_are_compared_and_timed(tmp_path: Path) -> None:
    names = "shufflenet_v2,mobilenet_v3"
    records, out = run(tmp_path, 1, "efficient_vs_torch.py", "--models", names, "--pairs", "1", "--steps", "1")
    assert [record["what"] for record in records] == ["shufflenet_v2", "mobilenet_v3"] and "channels_last" in out
    for record in records:
        assert record["difference"] < 5e-3 and record["ratio"] == pytest.approx(record["torch_seconds"] / record["seconds"])


def test_the_front_is_trained_printed_and_drawn(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for part, n in (("train", 128), ("test", 20)):
        x = rng.integers(0, 256, (n, 1, 28, 28)).astype(np.uint8)
        write_shards(tmp_path / "data" / part, x, rng.integers(0, 10, n), kind="classification")
    records, out = run(tmp_path, 1, "front.py", "data", "--models", "lenet,shufflenet_v2-0.5", "--steps", "2", "--draw", "drawn")
    assert [record["what"] for record in records] == ["lenet", "shufflenet_v2-0.5"]
    for record in records:
        assert 0 <= record["accuracy"] <= 1 and record["step_s"] > 0 and record["sample_s"] > 0 and record["length"] == "2 steps"
        assert f"{record['parameters']:,}" in out
    for theme in "light", "dark":
        assert ">lenet</text>" in (tmp_path / "drawn" / f"front-{theme}.svg").read_text()
