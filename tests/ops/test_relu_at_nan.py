"""ReLU passes NaN, and its gradient there, as PyTorch's does: alone and in every op that computes it along the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ops.parity import torch

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.kernels import KERNELS

pytestmark = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


@pytest.fixture(params=["native", "plain arrays"], autouse=True)
def version(request: Any, monkeypatch: Any) -> None:
    if request.param == "plain arrays":
        for name in ("relu", "relu_grad", "batch_norm", "batch_norm_gradients", "window_maximum", "window_maximum_gradient"):
            monkeypatch.setattr(KERNELS[name], "host", lambda: None)


def _with_nan(*shape: int, seed: int = 0, at: int = 1) -> np.ndarray:
    """Standard normal numbers; number `at` in memory, and another further on, are NaN."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x.flat[[at, x.size - 3]] = np.nan
    return x


def _compare(ours: Callable[..., Any], theirs: Callable[..., Any], *arrays: np.ndarray) -> None:
    leaves = [Tensor(x.copy(), requires_grad=True) for x in arrays]
    others = [torch.tensor(x, requires_grad=True) for x in arrays]
    y, z = ours(*leaves), theirs(*others)
    upstream = np.random.default_rng(5).standard_normal(y.shape).astype(np.float32)
    y.backward(upstream)
    z.backward(torch.tensor(upstream))
    np.testing.assert_allclose(y.array, z.detach().numpy(), rtol=1e-4, atol=1e-5)
    for leaf, other in zip(leaves, others):
        np.testing.assert_allclose(leaf.grad, other.grad.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [5, 100])
def test_relu_passes_the_gradient_at_nan(size: int) -> None:
    _compare(ops.relu, lambda x: x.relu(), _with_nan(3, size))


def test_relu_in_a_linear_layer_passes_the_gradient_at_nan() -> None:
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 20), (40, 20)))
    _compare(lambda x, w, b: ops.linear(x, w, b, "relu"), lambda x, w, b: (x @ w.T + b).relu(), x, w, _with_nan(40))


@pytest.mark.parametrize("reduce", [None, lambda array: array], ids=["one rank", "several"])
def test_relu_in_batch_norm_passes_the_gradient_at_nan(reduce: Any) -> None:
    def theirs(x: Any, w: Any, b: Any, r: Any = 0.0) -> Any:
        return (torch.nn.functional.batch_norm(x, None, None, w, b, training=True) + r).relu()
    x, w, b = (np.random.default_rng(2).standard_normal(shape).astype(np.float32) for shape in ((2, 5, 7, 7), 5, 5))
    _compare(lambda *xs: ops.batch_norm(*xs, relu=True, reduce=reduce)[0], theirs, _with_nan(2, 5, 7, 7), w, b)
    _compare(lambda x, w, b, r: ops.batch_norm(x, w, b, residual=r, relu=True, reduce=reduce)[0], theirs, x, w, b,
             _with_nan(2, 5, 7, 7))


@pytest.mark.parametrize("window", [(2, None, 0), (3, 3, 1)], ids=str)
def test_relu_in_pooling_passes_the_gradient_at_nan(window: Any) -> None:
    _compare(lambda x: ops.max_pool2d(x, *window, relu=True), lambda x: torch.nn.functional.max_pool2d(x, *window).relu(),
             _with_nan(2, 3, 40, 40))
