"""`inspect` shows which stage does what when, before there is a rank."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from mpitrain.config import MeshConfig, load_config
from mpitrain.errors import ConfigError
from mpitrain.plan import inspect
from mpitrain.plan.inspect import inspect_config, schedule_lines


def test_without_stages_each_rank_has_its_order(tmp_path: Path) -> None:
    assert list(schedule_lines(1, 2, 3)) == ["  rank 0: micro-batches 0..0: F0 B0",
                                             "  rank 1: micro-batches 1..2: F0 B0 F1 B1"]
    assert list(schedule_lines(1, 1, 2, name="zb_h1")) == ["  rank 0: micro-batches 0..1: F0 B0 W0 F1 B1 W1"]
    (tmp_path / "own.py").write_text("def nothing(stage, n_stages, n_micro):\n    return []\n")
    with pytest.raises(ConfigError, match='"own.py:nothing" with n_stages=1, n_micro=2, chunks=1: stage 0 of 1 runs nothing'):
        list(schedule_lines(1, 1, 2, name="own.py:nothing", folder=tmp_path))


def test_with_stages_each_number_of_micro_batches_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "get_terminal_size", lambda: os.terminal_size((40, 24)))
    lines = list(schedule_lines(2, 3, 5, name="interleaved", chunks=2))
    assert lines[:3] == [f"  pipeline {place}: micro-batches {its}" for place, its in enumerate(("0..0", "1..2", "3..4"))]
    assert [line.rpartition(", ")[2] for line in lines if line.startswith("schedule interleaved: 2 stages of 2 chunks, ")] == [
        "1 micro-batch", "2 micro-batches"]
    drawn = [line for line in lines if line.startswith(("  stage ", "  time "))]
    assert len(drawn) > 6 and max(map(len, drawn)) <= 40


def test_a_configuration_with_stages_is_drawn() -> None:
    config = load_config(Path(__file__).parents[2] / "examples/digits.toml", ["train.micro_batches=6"])
    config = dataclasses.replace(config, mesh=MeshConfig(pp=2, dp=2))
    lines = list(inspect_config(config, 4))
    assert "  pipeline 1: micro-batches 3..5" in lines
    assert "  stage 1  .  F0 B0--- F1 B1--- F2 B2--- .  ." in lines


@pytest.mark.parametrize("kind", ["none", "parameters"])
def test_buckets_are_those_of_each_stage_as_a_run_cuts_them(kind: str) -> None:
    """One for each stage's parameters, and where those are put together block by block, one for each block."""
    config = load_config(Path(__file__).parents[2] / "examples/digits.toml", [f"comm.sharding={kind}", "train.micro_batches=4"])
    config = dataclasses.replace(config, mesh=MeshConfig(pp=2, dp=2))
    lines = list(inspect_config(config, 4))
    first = next(i for i, line in enumerate(lines) if "gradient bucket" in line)
    heads = {"none": "1 gradient bucket of stage", "parameters": "2 gradient buckets of stage 1"}
    found = [line for line in lines[first:] if "(linear" in line or "(head" in line]
    assert any(line.startswith(heads[kind]) for line in lines)
    assert [line.partition("(")[2] for line in found] == {
        "none": ["linear0.weight .. linear0.bias)", "linear1.weight .. head.bias)"],
        "parameters": ["linear0.weight .. linear0.bias)", "head.weight .. head.bias)", "linear1.weight .. linear1.bias)"],
    }[kind]
