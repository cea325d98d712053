"""Models that are looked at have no memory: a prediction costs little however large they are, and says the same."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from launch import ROOT, Job, clean_environment

from mpitrain import ops
from mpitrain.plan.lent import Untouched

HUGE = """
from pathlib import Path
from mpitrain.backend import native
from mpitrain.backend.memory import resident
from mpitrain.plan.inspect import inspect

text = "\\n".join(inspect(Path("run.toml"), ["model.hidden=[200000,200000]", "comm.sharding=parameters"], ranks=64))
assert "activations  pool" in text and ("activations are not" in text) == (native.load("memory") is None), text
print(resident(peak=True) >> 10)     # getrusage would count the process that started this one
"""


def test_a_model_of_many_gigabytes_is_looked_at_in_no_memory_and_time(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text((ROOT / "mpitrain/digits.toml").read_text())
    result = Job([sys.executable, "-c", HUGE], clean_environment(), str(tmp_path)).finish(30)
    assert result.rc == 0, result.err
    assert int(result.out) < 300_000, "KiB: numpy and the package take 50,000; one of its parameters would take 160,000,000"


def test_what_is_made_of_an_untouched_matrix_is_an_ordinary_array() -> None:
    w, x = Untouched.of((3, 4), np.float32), np.ones((2, 4), np.float32)
    assert w.strides == (0, 0) and type(x @ w.T) is np.ndarray and (x @ w.T).shape == (2, 3)
    assert (x[0] @ w.T).shape == (3,) and (w @ x[0]).shape == (3,)
    assert type(w + 1) is np.ndarray and np.allclose(w + 1, 1.01) and np.allclose(ops.softmax(w).array, 0.25)
    assert type(np.take(w, [0, 2], axis=0)) is np.ndarray and np.allclose(np.take(w, [0, 2], axis=0), 0.01)
    assert np.matmul(x.T, np.ones((2, 4), np.float32), out=Untouched.of((4, 4), np.float32)).strides == (0, 0)
    w[...] = 7
    w += 7
    np.copyto(w, 7)
    np.add.at(w, [0], 7)
    assert np.allclose(w.sum(), 0.12)
