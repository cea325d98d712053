"""Matrix products against PyTorch and against differences."""

from __future__ import annotations

import numpy as np
import pytest
from ops.parity import Trained, check, check_gradient, torch

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.errors import ShapeError
from mpitrain.kernels import linear as layers
from mpitrain.ops.linalg import FUSED_ACTIVATIONS

PRODUCTS = [((3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)),
            ((2, 1, 3, 4), (5, 4, 2)), ((4,), (2, 4, 5)), ((2, 3, 4), (4,)), ((0, 4), (4, 5)), ((3, 0), (0, 5)),
            ((2, 0, 4), (4, 3)), ((1, 1), (1, 1)), ((2, 3, 4, 5), (5, 6)), ((3, 4), (2, 4, 5))]
LAYERS = [((3, 4), (5, 4)), ((4,), (5, 4)), ((2, 3, 4), (5, 4)), ((0, 4), (5, 4)), ((2, 0, 4), (5, 4)), ((3, 1), (1, 1))]


@pytest.mark.parametrize(("x", "y"), PRODUCTS)
def test_matmul_equals_torch(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    check(ops.matmul, "matmul", x, y)


@pytest.mark.parametrize(("x", "y"), PRODUCTS)
@pytest.mark.promise("D7")
def test_gradients_of_matmul_equal_differences(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    check_gradient(ops.matmul, x, y)


@pytest.mark.parametrize(("x", "weight"), LAYERS)
def test_linear_equals_torch(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    check(ops.linear, "nn.functional.linear", x, weight)
    check(ops.linear, "nn.functional.linear", x, weight, weight[:1])


@pytest.mark.parametrize(("x", "weight"), LAYERS)
@pytest.mark.promise("D7")
def test_gradients_of_linear_equal_differences(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    check_gradient(ops.linear, x, weight, weight[:1])


def test_a_broadcast_gradient_passes_through_products() -> None:
    """The gradient of a sum repeats one number in memory, which BLAS does not take."""
    check(lambda x, y: ops.sum(ops.matmul(x, y)), lambda x, y: (x @ y).sum(), (3, 4), (4, 5))
    check(lambda x, y: ops.sum(ops.matmul(x, y)), lambda x, y: (x @ y).sum(), (2, 3, 4), (2, 4, 5))
    check(lambda x, w, b: ops.sum(ops.linear(x, w, b)), lambda x, w, b: torch.nn.functional.linear(x, w, b).sum(),
          (3, 4), (5, 4), (5,))


@pytest.mark.parametrize("activation", [None, "relu"])
def test_where_one_call_makes_all_gradients_of_a_linear_layer_it_writes_into_the_given_memory(
        activation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    called, kernel = [], layers.linear_gradients
    monkeypatch.setattr(layers, "suits", lambda *arguments: True)
    monkeypatch.setattr(layers, "linear_gradients", lambda *arguments: called.append(arguments[5:7]) or kernel(*arguments))
    weight, bias = (Trained(np.ones(shape, np.float32), requires_grad=True) for shape in ((5, 4), (5,)))
    for leaf in (weight, bias):
        leaf.grad_buffer = np.full_like(leaf.array, np.nan)
    ops.linear(Tensor(np.ones((3, 4), np.float32)), weight, bias, activation=activation).backward(np.ones((3, 5), np.float32))
    (by_bias, by_weight), = called
    assert np.shares_memory(by_bias, bias.grad_buffer) and np.shares_memory(by_weight, weight.grad_buffer)
    assert (bias.grad == 3).all() and (weight.grad == 3).all()


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


FUSED = {"gelu": lambda x: torch.nn.functional.gelu(x), "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
         "relu": lambda x: torch.relu(x), "sigmoid": lambda x: torch.sigmoid(x), "silu": lambda x: torch.nn.functional.silu(x),
         "tanh": lambda x: torch.tanh(x)}
ALONE = {**{name: getattr(ops, name) for name in FUSED if name != "gelu_tanh"}, "gelu_tanh": lambda x: ops.gelu(x, "tanh")}


@pytest.mark.parametrize("name", sorted(FUSED_ACTIVATIONS))
def test_a_linear_layer_with_an_activation_equals_torch(name: str) -> None:
    for x, weight in (((3, 4), (5, 4)), ((2, 3, 4), (5, 4)), ((4,), (5, 4)), ((0, 4), (5, 4))):
        check(lambda x, w: ops.linear(x, w, None, name), lambda x, w: FUSED[name](x @ w.T), x, weight)
        check(lambda x, w, b: ops.linear(x, w, b, name), lambda x, w, b: FUSED[name](x @ w.T + b), x, weight, weight[:1])


@pytest.mark.parametrize("name", sorted(FUSED_ACTIVATIONS))
def test_an_activation_computed_with_the_layer_has_the_bits_of_one_computed_after_it(name: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((70, 33), (40, 33), (40,))]
    upstream = rng.standard_normal((70, 40)).astype(np.float32)
    found = []
    for forward in (lambda x, w, b: ops.linear(x, w, b, name), lambda x, w, b: ALONE[name](ops.linear(x, w, b))):
        leaves = [Tensor(a, requires_grad=True) for a in arrays]
        y = forward(*leaves)
        y.backward(upstream)
        found.append([y.array, *(t.grad for t in leaves)])
    assert all(np.array_equal(a, b) for a, b in zip(*found))


def test_an_activation_that_no_layer_computes_is_refused_by_name() -> None:
    with pytest.raises(ShapeError, match='linear: activation is None or one of gelu, gelu_tanh, relu, .*, not "softplus"'):
        ops.linear(np.ones((2, 4)), np.ones((5, 4)), None, "softplus")
