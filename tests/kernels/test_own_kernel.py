"""A user's own kernel: the one of docs/extending.md."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain import Tensor, gradcheck
from mpitrain.autograd import run_backward
from mpitrain.kernels import KERNELS


@pytest.fixture
def mine(tmp_path: Path) -> Any:
    document = (Path(__file__).parents[2] / "docs/extending.md").read_text()
    source, = re.findall(r"```python\n(# squareplus.py\n.*?)```", document, re.DOTALL)
    (tmp_path / "squareplus.py").write_text(source)
    specification = importlib.util.spec_from_file_location("squareplus", tmp_path / "squareplus.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    yield module
    del KERNELS["squareplus"]


@pytest.mark.parametrize("version", ["numba", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_its_operation_gives_the_formulas_values_and_gradients_by_either_version(mine: Any, version: str, dtype: str,
                                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    taken = mine.KERNEL.numba() if version == "numba" else mine.KERNEL.reference
    monkeypatch.setattr(mine.KERNEL, "host", lambda: lambda *arrays: called.append(1) or taken(*arrays))
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(dtype)[:, ::2]
    tensor = Tensor(x, requires_grad=True)
    result = mine.squareplus(tensor)
    run_backward(result, np.ones(x.shape, dtype))
    wide = x.astype(np.float64)
    wanted, slope = (wide + np.sqrt(wide ** 2 + 4)) / 2, (1 + wide / np.sqrt(wide ** 2 + 4)) / 2
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    assert called and result.array.dtype == tensor.grad.dtype == np.dtype(dtype)
    np.testing.assert_allclose(result.array, wanted, rtol=tolerance)
    np.testing.assert_allclose(tensor.grad, slope, rtol=tolerance)


def test_its_gradient_is_the_derivative(mine: Any) -> None:
    gradcheck(mine.squareplus, np.random.default_rng(0).normal(size=(3, 4)))
