"""Micro-batches as captured graphs: the bits of the same code uncaptured, and a line where a step cannot be captured.

The capture of the stand-in computes nothing, and its graphs do what was asked for during it at each launch (device_graphs), so
a number of one step that was frozen in a graph gives other losses here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import GPT, SMALL, record, steps, write, write_tokens
from standing import ON_DEVICE, mpirun

SHORT = "train.device=gpu", "train.steps=9", "train.batch_size=30", "train.eval_every=4"
DROPPING = "train.device=gpu", "train.steps=7", "train.batch_size=6", "train.eval_every=0", "model.dropout=0.2"
TWICE = """
from mpitrain import nn, ops
class Net(nn.Module):
    def __init__(self, dropout):
        self.first, self.drop, self.second = nn.Linear(8, 16), nn.Dropout(dropout), nn.Linear(16, 16)
        self.slopes, self.last = nn.RReLU(), nn.Linear(128, 10)
    def forward(self, x):
        x = self.drop(self.first(ops.reshape(x, -1, 8)))
        x = self.slopes(self.drop(self.second(x)))
        return self.last(ops.reshape(x, -1, 128))
def make(dropout):
    return Net(dropout)
"""


@pytest.mark.parametrize(("n", "activation", "micro_batches"), [(1, "relu", 1), (2, "gelu", 4), (1, "gelu", 5)])
def test_a_captured_run_has_the_bits_of_the_same_run_uncaptured(tmp_path: Path, n: int, activation: str,
                                                                micro_batches: int) -> None:
    """The last batch of micro-batches is uneven: 30 rows in 4 or 7, so that graphs of two shapes and several arenas are there.
    Two ranks exchange several buckets in each step."""
    config, more = write(tmp_path), (f"model.activation={activation}", f"train.micro_batches={micro_batches}")
    for name in ("on", "off"):
        result = mpirun(n, ON_DEVICE, "train", config, *SHORT, *more, f"train.graph={name}", f"run.out={name}",
                        "comm.bucket_mb=0.001", cwd=tmp_path)
        assert result.rc == 0, result.err
    assert [line["loss"] for line in steps(tmp_path / "on")] == [line["loss"] for line in steps(tmp_path / "off")]
    assert record(tmp_path / "on")["parameters_sha256"] == record(tmp_path / "off")["parameters_sha256"]


def test_a_captured_run_drops_what_the_same_run_uncaptured_drops(tmp_path: Path) -> None:
    """In attention, before residual sums, after embeddings: keys of a step and rows of a micro-batch that stayed in a graph would
    give other losses from the third step on.
    """
    write_tokens(tmp_path)
    config = write(tmp_path, GPT)
    runs = {name: (f"train.graph={name}", "train.micro_batches=3") for name in ("on", "off")}
    for name, more in {**runs, "without": (*runs["on"], "model.dropout=0.0")}.items():
        result = mpirun(1, ON_DEVICE, "train", config, *DROPPING, *more, f"run.out={name}", cwd=tmp_path)
        assert result.rc == 0, result.err
    losses = {path.name: [line["loss"] for line in steps(path)] for path in (tmp_path / name for name in (*runs, "without"))}
    assert losses["on"] == losses["off"] != losses["without"]
    assert record(tmp_path / "on")["parameters_sha256"] == record(tmp_path / "off")["parameters_sha256"]
    result = mpirun(1, ON_DEVICE, "train", config, *DROPPING, "train.graph=on", "train.recompute=true", cwd=tmp_path)
    assert result.rc == 78 and "blocks are computed again" in result.error_lines[0] and "train.graph" in result.error_lines[0]


def test_a_layer_of_the_users_that_drops_or_draws_slopes_is_captured(tmp_path: Path) -> None:
    """Rows that are parts of samples, a layer that is used twice, and random slopes."""
    (tmp_path / "net.py").write_text(TWICE)
    config = write(tmp_path, '[model]\nname = "net.py:make"\ndropout = 0.1\n' + SMALL[SMALL.index("[data]"):])
    for name in ("on", "off"):
        result = mpirun(1, ON_DEVICE, "train", config, *SHORT, "train.micro_batches=3", f"train.graph={name}", f"run.out={name}",
                        cwd=tmp_path)
        assert result.rc == 0, result.err
    assert [line["loss"] for line in steps(tmp_path / "on")] == [line["loss"] for line in steps(tmp_path / "off")]
    assert record(tmp_path / "on")["parameters_sha256"] == record(tmp_path / "off")["parameters_sha256"]


def test_a_step_that_brings_host_values_up_is_not_captured_since_cupy_would_not_refuse(tmp_path: Path) -> None:
    """A graph would read the pinned memory that the values went through, which CuPy has used for something else by then."""
    (tmp_path / "net.py").write_text("""
import numpy as np
from mpitrain import nn
class Scaled(nn.Module):
    def forward(self, x):
        return x * x.xp.asarray(np.linspace(0.5, 2.0, 16, dtype="float32"))
def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), Scaled(), nn.Linear(16, 10))
""")
    config = write(tmp_path, '[model]\nname = "net.py:make"\n' + SMALL[SMALL.index("[data]"):])
    result = mpirun(1, ON_DEVICE, "train", config, *SHORT, "train.graph=on", cwd=tmp_path)
    assert result.rc == 78 and "values of the host go up to the device in each step" in result.error_lines[0], result.err
    for name in ("auto", "off"):
        result = mpirun(1, ON_DEVICE, "train", config, *SHORT, f"train.graph={name}", f"run.out={name}", cwd=tmp_path)
        assert result.rc == 0, result.err
    assert record(tmp_path / "auto")["parameters_sha256"] == record(tmp_path / "off")["parameters_sha256"]


def test_graphs_are_for_devices_and_for_whole_models(tmp_path: Path) -> None:
    config = write(tmp_path)
    on_host = mpirun(1, "-m", "mpitrain", "train", config, "train.graph=on", "train.device=cpu", cwd=tmp_path)
    assert on_host.rc == 78 and 'train.graph = "on" captures graphs of train.device = "gpu"' in on_host.error_lines[0]
    together = mpirun(2, ON_DEVICE, "train", config, "train.device=gpu", "train.graph=on", "mesh.pp=2", cwd=tmp_path)
    assert together.rc == 78 and "the model is cut into 2 stages" in together.error_lines[0], together.err
