"""What does not fit is refused by a ShapeError in one line; and what NumPy and PyTorch do differently, PyTorch's way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ConfigError, ShapeError

torch = pytest.importorskip("torch")

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)
OBJECTS = np.array([1, None], object)
WRONG: dict[str, Callable[[], Any]] = {
    "swapaxes out of range": lambda: ops.swapaxes(X, 0, 5), "swapaxes of no dims": lambda: ops.swapaxes(X[0, 0], 0, 1),
    "squeeze out of range": lambda: ops.squeeze(X, 2), "squeeze of no dims": lambda: ops.squeeze(X[0, 0], 0),
    "sum over a dim twice": lambda: ops.sum(X, (0, 0)), "max over a dim twice": lambda: ops.max(X, (0, -2)),
    "minus a boolean": lambda: ops.negative(X > 1), "an integer to a negative power": lambda: ops.power(np.arange(3), -1),
    "split by a float": lambda: ops.split(X, 2.0), "no sizes": lambda: ops.adaptive_avg_pool2d(X[None, None], ()),
    "sizes of floats": lambda: ops.max_pool2d(X[None, None], (1.5, 2)), "objects": lambda: ops.exp(OBJECTS),
    "the sum of a number": lambda: ops.sum(1.5), "shapes that do not broadcast": lambda: ops.add(X, X.T),
    "a byte that is too large": lambda: ops.add(np.zeros(2, np.uint8), 300),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_a_shape_error_in_one_line(name: str) -> None:
    with pytest.raises(ShapeError) as caught:
        WRONG[name]()
    assert "\n" not in caught.value.message and len(caught.value.message) > 20


@pytest.mark.parametrize("op", [ops.add, ops.subtract, ops.multiply, ops.divide, ops.power, ops.maximum])
def test_two_numbers_make_a_tensor(op: Any) -> None:
    expected = {"add": 3.5, "subtract": -0.5, "multiply": 3.0, "divide": 0.75, "power": 2.25, "maximum": 2.0}
    assert op(1.5, 2.0).item() == expected[op.__name__]


@pytest.mark.parametrize("dtype", ["uint8", "bool", "int8", "int64"])
@pytest.mark.parametrize("name", ["exp", "sqrt", "log"])
def test_integers_become_float32(name: str, dtype: str) -> None:
    x = np.array([1, 1, 3]).astype(dtype)
    found, expected = getattr(ops, name)(x).array, getattr(torch, name)(torch.tensor(x)).numpy()
    assert found.dtype == expected.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-7)
    quotient = ops.divide(x, np.array([2, 4, 7], "uint8")).array
    assert quotient.dtype == np.float32
    np.testing.assert_allclose(quotient, x / np.array([2, 4, 7.0]), rtol=1e-7)


def test_a_huber_loss_without_a_middle_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"delta is 0.0, expected more than 0"):
        ops.huber(X, X, 0.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_smoothed_labels_are_exact_far_from_zero(dtype: str) -> None:
    logits, label = np.full((1, 3), -1e30, dtype), np.zeros(1, np.int64)
    assert ops.cross_entropy(logits, label, label_smoothing=0.1).item() == pytest.approx(np.log(3))


AT_NAN = {
    "maximum": (lambda m, x, y: m.maximum(x, y)), "minimum": (lambda m, x, y: m.minimum(x, y)),
    "absolute": (lambda m, x, y: m.absolute(x) + y), "root": (lambda m, x, y: x ** 0.5 + y),
}


@pytest.mark.parametrize("name", AT_NAN)
def test_gradients_at_special_values_are_pytorchs(name: str) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0])
    x, y = (a.ravel() for a in np.meshgrid(values, values))
    if name == "root":
        x = np.abs(x) * np.where(np.signbit(x) & (x == 0), -1.0, 1.0)
    ours = [Tensor(a, requires_grad=True) for a in (x, y)]
    theirs = [torch.tensor(a, requires_grad=True) for a in (x, y)]
    with np.errstate(all="ignore"):
        ops.sum(AT_NAN[name](ops, *ours)).backward()
    AT_NAN[name](torch, *theirs).sum().backward()
    for mine, wanted in zip(ours, theirs):
        np.testing.assert_array_equal(mine.grad, wanted.grad.numpy())


def test_the_gradient_of_an_exponent_at_zero_is_pytorchs() -> None:
    x, y = Tensor(np.zeros(3), requires_grad=True), Tensor(np.array([-1.0, 0.0, 2.0]), requires_grad=True)
    with np.errstate(all="ignore"):
        ops.sum(ops.power(x, y)).backward()
    np.testing.assert_array_equal(y.grad, [-np.inf, 0, 0])


def test_the_gradient_of_a_largest_nan_goes_to_it() -> None:
    x = Tensor(np.array([[np.nan, 1.0], [2.0, 3.0]]), requires_grad=True)
    ops.sum(ops.max(x, 1)).backward()
    np.testing.assert_array_equal(x.grad, [[1, 0], [0, 1]])


def test_the_default_rate_of_sgd_is_pytorchs() -> None:
    import inspect

    from mpitrain.optim.rules import SGD
    assert inspect.signature(SGD).parameters["lr"].default == inspect.signature(torch.optim.SGD).parameters["lr"].default


def test_a_tensor_is_a_sequence_of_its_rows() -> None:
    assert [row.array.tolist() for row in Tensor(X)] == X.tolist()
    with pytest.raises(ShapeError, match="index 5 is out of bounds"):
        Tensor(X)[5]
