"""Arithmetic, comparisons and activations against PyTorch and against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.parity import apart, check, check_gradient, normal, positive, torch

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError

BINARY = ["add", "subtract", "multiply", "maximum", "minimum"]
SHAPES = [((3, 4), (3, 4)), ((3, 4), (4,)), ((2, 1, 3), (5, 1)), ((), (2, 3)), ((1,), (1, 1)), ((0, 3), (3,)), ((2, 0), (1, 1))]
UNARY = ["negative", "absolute", "exp", "tanh", "sigmoid", "relu"]
ODD = [(3, 4), (), (1,), (0,), (2, 0, 3), (2, 3, 5)]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_arithmetic_equals_torch_over_broadcast_shapes(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    check(getattr(ops, name), name, *shapes)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_divide_and_power_equal_torch(shapes: tuple[tuple[int, ...], ...]) -> None:
    x, y = positive(*shapes[0]), positive(*shapes[1], seed=1)
    check(ops.divide, "divide", normal(*shapes[0]), y)
    check(ops.power, "pow", x, y)


@pytest.mark.parametrize("shape", ODD, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_array_equal_torch(name: str, shape: tuple[int, ...]) -> None:
    check(getattr(ops, name), name, 3 * normal(*shape))


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_log_and_sqrt_equal_torch(shape: tuple[int, ...]) -> None:
    check(ops.log, "log", positive(*shape))
    check(ops.sqrt, "sqrt", positive(*shape))


@pytest.mark.parametrize("shape", ODD, ids=str)
@pytest.mark.parametrize(("ours", "theirs"), [
    (lambda x: ops.gelu(x), lambda x: torch.nn.functional.gelu(x)),
    (lambda x: ops.gelu(x, approximate="tanh"), lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    (ops.silu, "nn.functional.silu"), (ops.softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x))),
    (ops.leaky_relu, "nn.functional.leaky_relu"),
    (lambda x: ops.leaky_relu(x, negative_slope=1.5), lambda x: torch.nn.functional.leaky_relu(x, 1.5)),
], ids=["gelu", "gelu_tanh", "silu", "softplus", "leaky_relu", "steep_leaky_relu"])
def test_activations_equal_torch(ours: Any, theirs: Any, shape: tuple[int, ...]) -> None:
    check(ours, theirs, 4 * normal(*shape))


@pytest.mark.parametrize("name", ["gelu", "silu", "softplus", "sigmoid", "tanh", "relu"])
def test_activations_survive_extreme_inputs(name: str) -> None:
    x = np.array([-1000, -100, -30, -9, -6, -1e-30, 0, 1e-30, 6, 9, 30, 100, 1000])
    theirs = {"softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x))}.get(name, f"nn.functional.{name}")
    check(getattr(ops, name), theirs, x)


def test_the_small_values_of_gelu_keep_their_digits() -> None:
    """Far left, x P(N < x) is tiny but not nothing; the numbers are from a table of the normal distribution."""
    x = np.array([-6.0, -5.0, -4.0])
    expected = [-6 * 9.86588e-10, -5 * 2.86652e-7, -4 * 3.16712e-5]
    assert np.allclose(ops.gelu(x).array, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("exponent", [2, 3, 0.5, -1, 0, 1])
def test_a_power_with_a_number_equals_torch(exponent: float) -> None:
    check(lambda x: ops.power(x, exponent), lambda x: x ** exponent, positive(3, 4))
    check(lambda x: ops.power(2.0, x), lambda x: 2.0 ** x, (3, 4))


def test_the_gradient_of_a_power_is_finite_at_zero() -> None:
    check(ops.power, "pow", np.array([0.0, 0.0, 0.0, 2.0]), np.array([2.0, 1.0, 0.5 + 1, 0.0]))
    check(lambda x: ops.power(x, 2), lambda x: x ** 2, np.array([0.0, -3.0]))


def test_ties_share_the_gradient_as_in_torch() -> None:
    x, y = np.array([1.0, 2.0, 3.0]), np.array([1.0, 5.0, 3.0])
    check(ops.maximum, "maximum", x, y)
    check(ops.minimum, "minimum", x, y)


@pytest.mark.parametrize(("low", "high"), [(-0.5, 0.5), (None, 0.25), (0.0, None)])
def test_clip_equals_torch(low: float | None, high: float | None) -> None:
    check(lambda x: ops.clip(x, low, high), lambda x: torch.clip(x, low, high), (4, 5))
    check(lambda x: ops.clip(x, low, high), lambda x: torch.clip(x, low, high), np.array([-0.5, 0.5, 0.0, 0.25]))


@pytest.mark.parametrize("name", ["greater", "greater_equal", "less", "less_equal"])
def test_comparisons_equal_torch_and_carry_no_gradient(name: str) -> None:
    x, y = np.array([[1.0, 2, 3], [3, 2, 1]]), np.array([1.0, 2, 2])
    check(getattr(ops, name), name, x, y, gradients=False)
    result = getattr(ops, name)(Tensor(x, requires_grad=True), y)
    assert result.dtype == bool and not result.requires_grad


def test_equality_compares_values() -> None:
    assert ops.equal(np.array([1.0, 2.0]), 2.0).array.tolist() == [False, True]
    assert ops.not_equal(np.array([1.0, 2.0]), 2.0).array.tolist() == [True, False]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_where_equals_torch(shapes: tuple[tuple[int, ...], ...]) -> None:
    condition = normal(*np.broadcast_shapes(*shapes), seed=5) > 0
    check(lambda x, y: ops.where(condition, x, y), lambda x, y: torch.where(torch.tensor(condition), x, y), *shapes)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", [*BINARY, "divide", "power"])
@pytest.mark.promise("D7")
def test_gradients_of_arithmetic_equal_differences(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    check_gradient(getattr(ops, name), 1 + apart(*shapes[0]) ** 2, 0.33 + apart(*shapes[1], seed=3) ** 2)


@pytest.mark.parametrize("shape", ODD, ids=str)
@pytest.mark.parametrize("name", [*UNARY, "gelu", "silu", "softplus", "leaky_relu"])
@pytest.mark.promise("D7")
def test_gradients_of_functions_equal_differences(name: str, shape: tuple[int, ...]) -> None:
    check_gradient(getattr(ops, name), apart(*shape))


def test_a_number_does_not_change_the_dtype() -> None:
    x = Tensor(np.ones(3, np.float32))
    for result in (x + 1, 2.5 * x, x / 3, 1 - x, x ** 2, ops.maximum(x, 0.5), ops.clip(x, 0, 1), ops.where(x.array > 0, x, 0.0)):
        assert result.dtype == np.float32


def test_mixing_float_dtypes_is_refused() -> None:
    with pytest.raises(ShapeError, match="Add: inputs of float32 and float64; convert one of them first"):
        ops.add(np.ones(2, np.float32), np.ones(2))


def test_an_unknown_approximation_of_gelu_is_refused() -> None:
    with pytest.raises(ShapeError, match='gelu: approximate is "none" or "tanh", not "erf"'):
        ops.gelu(np.ones(2), approximate="erf")
