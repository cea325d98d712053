"""Numba's loops as a later process loads them: of the same results as in the process that compiled them, and right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

# What LLVM makes depends on what the process compiled before (after many, row_norm was right): each loop has its own process.
CODE = """
import sys
import numpy as np
from mpitrain.kernels.{module} import {name} as kernel
loop, x = kernel.numba(), np.random.default_rng(0).normal(size=(3, 568)).astype("{dtype}")
given = {given}
for found, wanted in zip(loop(*given), kernel.reference(*given)):
    if isinstance(wanted, np.ndarray) and wanted.size:
        np.testing.assert_allclose(found, wanted, rtol={tolerance}, atol={tolerance})
        sys.stdout.write(found.tobytes().hex())
from numba.core.dispatcher import Dispatcher
import gc
stats = [d.stats for d in gc.get_objects() if isinstance(d, Dispatcher) and d.py_func.__name__ == "{name}"]
sys.stderr.write(f"loaded {{sum(sum(s.cache_hits.values()) for s in stats)}}")
"""
NORM = "(x, None, np.ones(568, x.dtype), np.zeros(568, x.dtype), 1e-5, True, None)"


@pytest.mark.parametrize(("module", "name", "given"), [("layer_norm", "row_norm", NORM), ("rows", "softmax", "(x,)")],
                         ids=("row_norm", "softmax"))
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.slow
def test_a_loop_from_the_disk_is_right(module: str, name: str, given: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    code = CODE.format(module=module, name=name, given=given, dtype=dtype, tolerance=tolerance)
    environment = {key: value for key, value in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "MPITRAIN_KERNELS")}
    environment["MPITRAIN_CACHE_DIR"] = str(tmp_path / "cache")
    first, second = (subprocess.run([sys.executable, "-P", "-c", code], env=environment, check=False, capture_output=True,
                                    text=True) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "loaded 0" in first.stderr and "loaded 0" not in second.stderr, "the second process loaded nothing from the disk"
    assert first.stdout == second.stdout and first.stdout
