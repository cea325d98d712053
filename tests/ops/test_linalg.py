"""Matrix products against PyTorch and against differences."""

from __future__ import annotations

import numpy as np
import pytest
from ops.parity import check, check_gradient, torch

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError

PRODUCTS = [((3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)),
            ((2, 1, 3, 4), (5, 4, 2)), ((4,), (2, 4, 5)), ((2, 3, 4), (4,)), ((0, 4), (4, 5)), ((3, 0), (0, 5)),
            ((2, 0, 4), (4, 3)), ((1, 1), (1, 1)), ((2, 3, 4, 5), (5, 6)), ((3, 4), (2, 4, 5))]
LAYERS = [((3, 4), (5, 4)), ((4,), (5, 4)), ((2, 3, 4), (5, 4)), ((0, 4), (5, 4)), ((2, 0, 4), (5, 4)), ((3, 1), (1, 1))]


@pytest.mark.parametrize(("x", "y"), PRODUCTS)
def test_matmul_equals_torch(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    check(ops.matmul, "matmul", x, y)


@pytest.mark.parametrize(("x", "y"), PRODUCTS)
def test_gradients_of_matmul_equal_differences(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    check_gradient(ops.matmul, x, y)


@pytest.mark.parametrize(("x", "weight"), LAYERS)
def test_linear_equals_torch(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    check(ops.linear, "nn.functional.linear", x, weight)
    check(ops.linear, "nn.functional.linear", x, weight, weight[:1])


@pytest.mark.parametrize(("x", "weight"), LAYERS)
def test_gradients_of_linear_equal_differences(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    check_gradient(ops.linear, x, weight, weight[:1])


def test_a_broadcast_gradient_passes_through_products() -> None:
    """The gradient of a sum repeats one number in memory, which BLAS does not take."""
    check(lambda x, y: ops.sum(ops.matmul(x, y)), lambda x, y: (x @ y).sum(), (3, 4), (4, 5))
    check(lambda x, y: ops.sum(ops.matmul(x, y)), lambda x, y: (x @ y).sum(), (2, 3, 4), (2, 4, 5))
    check(lambda x, w, b: ops.sum(ops.linear(x, w, b)), lambda x, w, b: torch.nn.functional.linear(x, w, b).sum(),
          (3, 4), (5, 4), (5,))


def test_the_gradients_of_a_linear_layer_are_written_into_the_given_memory() -> None:
    weight, bias = (Tensor(np.ones(shape, np.float32), requires_grad=True) for shape in ((5, 4), (5,)))
    weight.grad_buffer, bias.grad_buffer = np.full((5, 4), np.nan, np.float32), np.full(5, np.nan, np.float32)
    ops.sum(ops.linear(np.ones((3, 4), np.float32), weight, bias)).backward()
    assert weight.grad is weight.grad_buffer and bias.grad is bias.grad_buffer
    assert (weight.grad == 3).all() and (bias.grad == 3).all()


@pytest.mark.parametrize(("x", "y"), [((3, 4), (3, 4)), ((), (3,)), ((4,), (3,))])
def test_shapes_that_do_not_fit_are_named(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="matmul: shapes .* do not fit"):
        ops.matmul(np.ones(x), np.ones(y))


def test_a_layer_that_does_not_fit_its_input_is_named() -> None:
    with pytest.raises(ShapeError, match=r"linear: an input of shape \(2, 3\) does not fit a weight of shape \(5, 4\)"):
        ops.linear(np.ones((2, 3)), np.ones((5, 4)))
    with pytest.raises(ShapeError, match=r"linear: a bias of shape \(4,\) does not fit a weight of shape \(5, 4\)"):
        ops.linear(np.ones((2, 4)), np.ones((5, 4)), np.ones(4))
