"""`train.precision = "bfloat16"`: refused where it would be slower, and what a run in it keeps."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
from launch import Result
from runs import SMALL, lines, record, steps, without_times, write
from standing import mpirun, train

from mpitrain.checkpoint import store
from mpitrain.config import load_config
from mpitrain.errors import ConfigError
from mpitrain.train.build import precision

# Products from M N K = 2**20 on are rounded: 128 x 256 x 64 and 128 x 256 x 256 are.
WIDE = SMALL.replace("hidden = [32]", "hidden = [256, 256]").replace("batch_size = 48", "batch_size = 128")

# The trainer's own program, but for the check of the CPU: the kernel below adds the same pairs without the instruction.
UNCHECKED = """
import sys
from mpitrain.cli import main
from mpitrain.comm.job.guard import Process
from mpitrain.train.build import precision
precision.refuse = lambda name: None
Process().run(lambda: main(sys.argv[1:]))
"""


def run(n: int, folder: Any, *arguments: str, kind: str = "bfloat16") -> Result:
    (folder / "unchecked.py").write_text(UNCHECKED)
    result = mpirun(n, folder / "unchecked.py", "train", folder / "run.toml", f"train.precision={kind}", *arguments, cwd=folder)
    assert result.rc == 0 and result.error_lines == [], result.out + result.err
    return result


def with_cpu(monkeypatch: pytest.MonkeyPatch, flags: set[str], instruction: bool = True, one: bool = True) -> None:
    monkeypatch.setattr(precision, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(precision, "cpu_info", lambda: {"model name": "Some CPU"})
    monkeypatch.setattr(precision, "has_bfloat16_instruction", lambda: instruction)
    monkeypatch.setattr(precision, "one_thread", lambda: one)


def test_it_is_taken_where_the_cpu_and_the_compiler_have_the_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpu(monkeypatch, {"avx512f", "avx512_bf16"})
    precision.refuse("bfloat16")


def test_a_cpu_without_the_instruction_is_named_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpu(monkeypatch, {"avx512f", "avx512_vnni"})
    precision.refuse("float32")
    with pytest.raises(ConfigError, match=r"would only be slower here: Some CPU has no instruction .*no avx512_bf16 in /proc/c"):
        precision.refuse("bfloat16")


def test_a_compiler_without_the_instruction_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpu(monkeypatch, {"avx512_bf16"}, instruction=False)
    with pytest.raises(ConfigError, match="GCC 10 or newer: the compiler does not know them; install one, or set"):
        precision.refuse("bfloat16")
    monkeypatch.setattr(precision.native, "missing", lambda: {"product_bfloat16": "no C compiler (cc, gcc or clang)"})
    with pytest.raises(ConfigError, match="no C compiler"):
        precision.refuse("bfloat16")
    monkeypatch.setattr(precision.native, "wanted", lambda: "numba")
    with pytest.raises(ConfigError, match="unset MPITRAIN_KERNELS, or set"):
        precision.refuse("bfloat16")


def test_several_threads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpu(monkeypatch, {"avx512_bf16"}, one=False)
    with pytest.raises(ConfigError, match="computes on one thread a rank, where float32 has several here; set OMP_NUM_THREADS=1"):
        precision.refuse("bfloat16")


def test_more_threads_a_rank_are_refused_in_the_configuration(tmp_path) -> None:
    config = write(tmp_path)
    with pytest.raises(ConfigError, match='train.precision = "bfloat16" computes on one thread a rank, found train.threads = 2'):
        load_config(config, ["train.precision=bfloat16", "train.threads=2"])
    assert load_config(config, ["train.precision=bfloat16", "train.threads=1"]).train.precision == "bfloat16"


@pytest.mark.skipif(precision.FLAG in precision.cpu_flags(), reason="this CPU has the instruction")
def test_a_run_on_a_cpu_without_the_instruction_ends_with_one_line_and_writes_nothing(tmp_path) -> None:
    result = train(2, write(tmp_path), "train.precision=bfloat16")
    assert result.rc == 78 and len(result.error_lines) == 1 and "would only be slower here" in result.error_lines[0]
    assert not (tmp_path / "runs").exists()


def test_the_loss_falls_as_in_float32_and_checkpoints_hold_float32(tmp_path) -> None:
    write(tmp_path, WIDE)
    run(1, tmp_path, "run.out=half")
    run(1, tmp_path, "run.out=full", kind="float32")
    half, full = (np.array([line["loss"] for line in steps(tmp_path / name)]) for name in ("half", "full"))
    assert 1e-6 < np.abs(half / full - 1)[:10].max() < 1e-2, "near float32's, and not the same"
    assert half[-1] < half[0] / 3 and abs(half[-1] - full[-1]) < 0.1 * full[0]
    assert record(tmp_path / "half")["threads"] == 1
    found = store.latest(tmp_path / "half" / "checkpoints")
    kinds = {name: found.arrays[name].dtype.name for name in found.arrays if "step" not in name}
    assert set(kinds.values()) <= {"float32", "float64"} and list(kinds.values()).count("float32") >= 3 * 6
    weight = next(found.read(name) for name in found.arrays if name.endswith("weight"))
    assert (weight.view(np.uint32) & 0xFFFF).any(), "the master weights are not rounded"


@pytest.mark.promise("D8")
def test_a_resumed_run_ends_with_the_same_bits_and_two_ranks_agree(tmp_path) -> None:
    write(tmp_path, WIDE)
    more = ("train.steps=8", "checkpoint.every=4", "checkpoint.keep=9", "checkpoint.best=false")
    run(2, tmp_path, "run.out=whole", *more)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    first, last = sorted((tmp_path / "cut" / "checkpoints").glob("step-*"))
    shutil.rmtree(last)
    run(2, tmp_path, "run.out=cut", *more, "--resume")
    assert record(tmp_path / "cut")["parameters_sha256"] == record(tmp_path / "whole")["parameters_sha256"]
    assert without_times(lines(tmp_path / "cut")) == without_times(lines(tmp_path / "whole"))


@pytest.mark.promise("D8")
def test_a_gradient_that_overflows_on_one_rank_ends_or_skips_the_step_on_all(tmp_path) -> None:
    """There is no scale of the loss: bfloat16 has the exponents of float32."""
    (tmp_path / "net.py").write_text("""
import os
from mpitrain import nn, ops
class Over(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += self.training
        large = self.training and self.calls > 2 and os.environ["OMPI_COMM_WORLD_RANK"] == "1"
        return super().forward(x) * (1e30 if large else 1.0) * (1e30 if large else 1.0)
def net():
    return nn.Sequential(("flat", nn.Flatten()), ("a", nn.Linear(64, 256)), ("b", nn.Linear(256, 256)), ("c", Over(256, 10)))
""")
    write(tmp_path, WIDE.replace('name = "mlp"\ninputs = 64\nhidden = [256, 256]\noutputs = 10', 'name = "net.py:net"'))
    (tmp_path / "unchecked.py").write_text(UNCHECKED)
    stopped = mpirun(2, tmp_path / "unchecked.py", "train", "run.toml", "train.precision=bfloat16", "run.out=stop", cwd=tmp_path)
    line, = stopped.error_lines
    assert stopped.rc == 79 and "E_NAN rank=1/2" in line and "step=3" in line and '"c" (Over)' in line
    more = ("train.steps=3", "optimizer.schedule=constant", "optimizer.warmup_steps=0")
    run(2, tmp_path, "run.out=three", "train.on_nan=skip", *more)
    run(2, tmp_path, "run.out=two", *more[1:], "train.steps=2")
    assert record(tmp_path / "three")["parameters_sha256"] == record(tmp_path / "two")["parameters_sha256"]
    assert [line.get("skipped") for line in steps(tmp_path / "three")] == [None, None, 1]
