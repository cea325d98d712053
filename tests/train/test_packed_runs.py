"""Whole runs whose slices travel as few bits: close to float32, taken up on other ranks, their bytes, and what is refused."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from runs import SMALL, record, steps, write
from standing import mpirun, train

pytestmark = pytest.mark.timeout(120)
RUN = SMALL.replace("steps = 50", "steps = 20").replace("eval_every = 25", "eval_every = 10").replace("[32]", "[96]")
PACKED = ("comm.compress_force=true", "comm.compress=int8", "comm.compress_parameters=int8", "comm.bucket_mb=0.01")


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("kind", ["optimizer", "parameters"])
def test_a_run_that_is_taken_up_again_has_the_bits_of_one_that_was_not(tmp_path: Path, kind: str) -> None:
    """Then on two ranks, and on one, which rounds nothing. Owners' float32 is what a checkpoint has."""
    config = write(tmp_path, RUN)
    options = (f"comm.sharding={kind}", "checkpoint.every=11", "checkpoint.keep=9", "train.micro_batches=6")
    plain = train(3, config, "run.out=plain", *options)
    assert plain.rc == 0, plain.err
    result = train(3, config, "run.out=a", *options, *PACKED)
    assert result.rc == 0, result.err
    whole = record(tmp_path / "a")
    assert whole["metrics"]["loss"] == pytest.approx(record(tmp_path / "plain")["metrics"]["loss"], rel=0.02)
    assert whole["parameters_sha256"] != record(tmp_path / "plain")["parameters_sha256"]
    shutil.rmtree(tmp_path / "a/checkpoints/step-00000020")
    for other in "bc":
        shutil.copytree(tmp_path / "a", tmp_path / other)
    result = train(3, config, "run.out=a", *options, *PACKED, "--resume")
    assert result.rc == 0, result.err
    again = record(tmp_path / "a")
    assert again["parameters_sha256"] == whole["parameters_sha256"] and again["metrics"] == whole["metrics"]
    for n, folder in ((2, "b"), (1, "c")):
        result = train(n, config, f"run.out={folder}", *options, *PACKED, "--resume")
        assert result.rc == 0, result.err
        assert record(tmp_path / folder)["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=0.02)


def test_replay_compares_no_bits_of_ranks_that_computed_with_rounded_parameters(tmp_path: Path) -> None:
    config = write(tmp_path, RUN)
    result = train(2, config, "run.out=a", "comm.sharding=optimizer", "train.steps=7", "checkpoint.every=3", "checkpoint.keep=9",
                   *PACKED)
    assert result.rc == 0, result.err
    for step in ("4", "6"):
        result = mpirun(1, "-m", "mpitrain", "replay", "a", "--step", step, cwd=tmp_path)
        assert result.rc == 0, result.err


OWN = """
from mpitrain.parallel.compress.blocks import Int8

class Third(Int8):
    def decode(self, message, first, stop, total, add):
        super().decode(message, first, stop, total, add)
        total[::3] = 0
"""


def test_a_compressor_of_ones_own_is_proved_before_parameters_travel_by_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = write(tmp_path, RUN)
    options = ("comm.sharding=parameters", "comm.compress_force=true", "comm.compress_parameters=own.py:Third")
    inspected = mpirun(1, "-m", "mpitrain", "inspect", config, "--ranks", "2", *options, cwd=tmp_path)
    for result in (train(2, config, *options), inspected):
        line, = result.error_lines
        assert result.rc == 78 and "E_COMPRESS" in line, line


def test_a_run_says_what_travels_and_counts_it(tmp_path: Path) -> None:
    """On one node nothing does unless it is forced. Gradients leave once for each micro-batch, blocks come twice."""
    config = write(tmp_path, RUN)
    result = train(2, config, "run.out=a", "comm.sharding=optimizer", *PACKED[1:])
    assert result.rc == 0 and "int8\" has no effect: all 2 ranks are on one node, where messages take less time" in result.out
    told = train(2, config, "run.out=a", "comm.sharding=optimizer", *PACKED, "train.steps=21", "--resume")
    assert told.rc == 0 and "parameters went from their owners to all in float32, and do as int8" in told.out, told.out
    sent = {}
    for kind in ("optimizer", "parameters"):
        result = train(2, config, f"run.out={kind}", f"comm.sharding={kind}", "train.micro_batches=4", "train.eval_every=100",
                       *PACKED)
        assert result.rc == 0, result.err
        assert "parameters travel as int8 between 2 ranks" in result.out and "owners keep float32" in result.out
        lines = steps(tmp_path / kind)
        assert len({line["wire_bytes"] for line in lines}) == 1
        assert 3.4 < lines[0]["compress_ratio"] < 4 and 3.4 < lines[0]["gather_ratio"] < 4
        sent[kind] = lines[1]["wire_bytes"], lines[1]["gather_bytes"]
        seen = mpirun(1, "-m", "mpitrain", "inspect", config, "--ranks", "2", f"comm.sharding={kind}", *PACKED, cwd=tmp_path).out
        travel = re.findall(r"travel as .* ([0-9,]+) bytes of a rank .* instead of ([0-9,]+);", result.out)
        assert len(travel) == 2
        said = re.findall(r"as int8 to .* ([0-9,]+) bytes of a rank instead of ([0-9,]+)", seen)
        rounds = 2 if kind == "parameters" else 1
        assert [number(one) for one in said[1]] == [number(one) for one in travel[0]]
        assert [rounds * number(one) for one in said[0]] == [number(one) for one in travel[1]]
    assert all(1.5 < many / few < 4 for many, few in zip(sent["parameters"], sent["optimizer"]))    # ranks have unequal slices


@pytest.mark.parametrize(("options", "words"), [
    (("comm.sharding=none", "comm.compress_parameters=int8"), "is for ranks that give each other slices"),
    (("comm.sharding=optimizer", "comm.compress_parameters=topk:0.1"), "must send every parameter, in blocks"),
    (("comm.sharding=optimizer", "comm.compress_parameters=onebit"), "must send every parameter, in blocks"),
    (("comm.sharding=optimizer", "comm.compress_parameters=int8:stochastic"), "rounded to the nearest"),
    (("comm.sharding=optimizer", "comm.compress_parameters=int7"), 'comm.compress_parameters = "int7": unknown compressor'),
    (("comm.sharding=optimizer", "comm.compress_parameters=int8", "train.reproducible=layout", "train.micro_batches=4"),
     "promises the bits of one rank"),
    (("comm.sharding=optimizer", "comm.compress_parameters=int8", "train.precision=float64"), "rounds float32"),
    (("comm.sharding=optimizer", "comm.compress=topk:0.1"), "and not slices of them"),
    (("comm.sharding=parameters", "comm.compress=powersgd:2"), "and not slices of them"),
    (("comm.sharding=gradients", "comm.compress=onebit"), "lives by its residuals")])
def test_what_does_not_go_together_is_refused_in_one_line(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    result = train(2, write(tmp_path, RUN), *options)
    line, = result.error_lines
    assert result.rc == 78 and words in line, line
