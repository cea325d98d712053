"""Activations in pieces and gated ones: PyTorch's values and gradients on both sides of each bound and at it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import autograd, ops
from mpitrain.autograd import Tensor
from mpitrain.backend import random
from mpitrain.errors import ConfigError, MpitrainError, ShapeError

torch = pytest.importorskip("torch")
F = torch.nn.functional
POINTS = np.array([-7.5, -6, -3.0001, -3, -2.9999, -1, -0.5001, -0.5, -0.1, -0.0, 0.0, 0.1, 0.5, 0.5001, 1, 2.9999, 3, 3.0001, 6,
                   7.5, 30.0, -30.0])
BOUNDED: dict[str, tuple[Any, Any]] = {
    "celu": (lambda x: ops.celu(x, 2.0), lambda x: F.celu(x, 2.0)),
    "elu": (lambda x: ops.elu(x, 0.7), lambda x: F.elu(x, 0.7)),
    "selu": (ops.selu, F.selu),
    "hardshrink": (ops.hardshrink, F.hardshrink),
    "softshrink": (lambda x: ops.softshrink(x, 1.0), lambda x: F.softshrink(x, 1.0)),
    "hardtanh": (lambda x: ops.hardtanh(x, -0.5, 3.0), lambda x: F.hardtanh(x, -0.5, 3.0)),
    "relu6": (ops.relu6, F.relu6),
    "hardsigmoid": (ops.hardsigmoid, lambda x: F.relu6(x + 3) / 6),   # the gradient of F.hardsigmoid has 1 / 6 in float32
    "hardswish": (ops.hardswish, F.hardswish),
    "threshold": (lambda x: ops.threshold(x, -0.5, 20.0), lambda x: F.threshold(x, -0.5, 20.0)),
    "prelu": (lambda x: ops.prelu(x, np.array([0.3], x.dtype)), lambda x: F.prelu(x, torch.tensor([0.3], dtype=x.dtype))),
    "softplus": (lambda x: ops.softplus(x, 2.0, 20.0), lambda x: F.softplus(x, 2.0, 20.0)),
    "mish": (ops.mish, F.mish), "log_sigmoid": (ops.log_sigmoid, F.logsigmoid), "softsign": (ops.softsign, F.softsign),
    "tanhshrink": (ops.tanhshrink, F.tanhshrink), "glu": (ops.glu, F.glu), "softmin": (ops.softmin, lambda x: F.softmin(x, -1)),
    "swiglu": (ops.swiglu, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", BOUNDED)
def test_values_and_gradients_are_pytorchs_also_at_the_bounds(name: str, dtype: str) -> None:
    mine, theirs = BOUNDED[name]
    x, y = Tensor(POINTS.astype(dtype), requires_grad=True), torch.tensor(POINTS.astype(dtype), requires_grad=True)
    found, wanted = mine(x), theirs(y)
    cotangent = np.linspace(0.5, 2.0, len(found.array)).astype(dtype)
    found.backward(cotangent)
    wanted.backward(torch.tensor(cotangent))
    tolerance = {"rtol": 1e-12, "atol": 1e-13} if dtype == "float64" else {"rtol": 3e-6, "atol": 3e-6}
    assert found.dtype == dtype and x.grad.dtype == dtype
    np.testing.assert_allclose(found.array, wanted.detach().numpy(), **tolerance)
    np.testing.assert_allclose(x.grad, y.grad.numpy(), **tolerance)


@pytest.mark.parametrize("name", ["celu", "elu", "selu", "hardswish", "mish", "log_sigmoid", "softsign", "tanhshrink", "glu",
                                  "swiglu"])
def test_second_derivatives_are_pytorchs(name: str) -> None:
    mine, theirs = BOUNDED[name]
    points = np.array([-4.0, -2.0, -0.3, 0.4, 1.5, 5.0])
    x, y = Tensor(points, requires_grad=True), torch.tensor(points, requires_grad=True)
    with autograd.keep_inputs():
        value = mine(x)
    first, = autograd.grad((value ** 2).sum(), [x], create_graph=True)
    second, = autograd.grad((first ** 2).sum(), [x])
    one, = torch.autograd.grad((theirs(y) ** 2).sum(), [y], create_graph=True)
    two, = torch.autograd.grad((one ** 2).sum(), [y])
    np.testing.assert_allclose(second.array, two.numpy(), rtol=1e-10, atol=1e-12)


def test_random_slopes_belong_to_the_sample_and_lie_in_their_interval() -> None:
    x = -np.ones((6, 50))
    with random.use(random.Scope(seed=1, samples=np.arange(6))):
        whole = ops.rrelu(x, "layer", 0.1, 0.3).array
    with random.use(random.Scope(seed=1, samples=np.arange(3, 6))):
        part = ops.rrelu(x[3:], "layer", 0.1, 0.3).array
    assert np.array_equal(whole[3:], part)
    assert (-whole >= 0.1).all() and (-whole < 0.3).all() and abs(-whole.mean() - 0.2) < 0.02
    assert len(np.unique(whole)) == whole.size


@pytest.mark.parametrize(("wrong", "says", "error"), [
    (lambda: ops.glu(np.ones((2, 3))), "an even size", ShapeError), (lambda: ops.glu(np.ones(())), "an even size", ShapeError),
    (lambda: ops.glu(np.ones((2, 0))), "2 or more", ShapeError), (lambda: ops.swiglu(np.ones(4), 3), "an even size", ShapeError),
    (lambda: ops.prelu(np.ones((2, 3)), np.ones(2)), "one for each channel", ShapeError),
    (lambda: ops.prelu(np.ones(3), np.ones((1, 1))), "one for each channel", ShapeError),
    (lambda: ops.celu(np.ones(2), 0.0), "alpha is 0", ConfigError),
    (lambda: ops.softplus(np.ones(2), 0.0), "beta is 0", ShapeError),
    (lambda: ops.hardtanh(np.ones(2), 2.0, 1.0), "min_val <= max_val", ConfigError),
    (lambda: ops.softshrink(np.ones(2), -1.0), "at least 0", ConfigError),
    (lambda: ops.elu(np.arange(3)), "expected float32 or float64", ShapeError),
    (lambda: ops.rrelu(np.ones(()), "layer"), "no dims", ShapeError)])
def test_what_cannot_be_is_refused_in_one_line(wrong: Any, says: str, error: type[MpitrainError]) -> None:
    with pytest.raises(error, match=says) as caught:
        wrong()
    assert "\n" not in str(caught.value)
