"""benchmarks/overlap.py runs on any number of ranks and writes figures that belong together."""

from __future__ import annotations

import json

import pytest
from launch import ROOT, mpirun


def test_it_writes_what_it_measured_and_hidden_and_share_follow_from_it(tmp_path):
    result = mpirun(2, ROOT / "benchmarks/overlap.py", "--model", "mlp", "--batch", "4", "--rounds", "1", "--bucket-mb", "auto",
                    "--progress", "thread", "--json", tmp_path / "o.jsonl", timeout=150)
    assert result.rc == 0 and result.error_lines == [], result.err
    found = json.loads((tmp_path / "o.jsonl").read_text())
    assert (found["bench"], found["ranks"], found["batch"], found["progress"]) == ("overlap", 2, 4, "thread")
    assert found["hidden"] == pytest.approx(1 - found["exposed_s"] / found["communication_alone_s"])
    assert found["share"] == pytest.approx(found["exposed_s"] / found["step_s"])
    assert 0 <= found["exposed_s"] < found["step_s"] and 0 < found["backward_alone_s"] < found["step_alone_s"]
    assert "communication alone" in result.out and f"{found['buckets']} buckets" in result.out


def test_a_batch_that_ranks_cannot_share_is_refused():
    result = mpirun(2, ROOT / "benchmarks/overlap.py", "--batch", "3", timeout=60)
    assert result.rc == 64 and len(result.error_lines) == 1
    assert "--batch 3 does not divide by 2 ranks; give a multiple" in result.error_lines[0]
