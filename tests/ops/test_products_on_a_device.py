"""Layers and products of matrices on a device: gradients against float64, how many launches they are, where sums are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakegpu import DeviceArray, counted, put, runtime, xp
from ops.parity import Trained

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.autograd.accumulate import is_private
from mpitrain.ops.linalg import FUSED_ACTIVATIONS


@pytest.fixture(params=["library", "kernel"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by the stand-in's library, or by our kernel where it serves none."""
    if request.param == "kernel":
        monkeypatch.setattr(runtime, "product", lambda *_: False)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def leaf(values: np.ndarray, given: bool = False) -> Any:
    """A leaf on the device; with the memory that its gradient is sent from, as a reducer gives it."""
    made = (Trained if given else Tensor)(put(values), requires_grad=True)
    if given:
        made.grad_buffer = put(np.full_like(values, np.nan))
    return made


def close(found: Any, wanted: Any) -> None:
    got = found.get()
    assert got.shape == wanted.shape and np.abs(got - wanted).max() <= 3e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", [None, *sorted(FUSED_ACTIVATIONS)])
def test_a_layer_and_its_gradients_are_the_hosts(way: None, activation: str | None, biased: bool) -> None:
    given = numbers(2, 35, 21), numbers(13, 21, seed=1), numbers(13, seed=2), numbers(2, 35, 13, seed=3)
    wide = [Tensor(values.astype("float64"), requires_grad=True) for values in given[:3]]
    ops.linear(wide[0], wide[1], wide[2] if biased else None, activation).backward(given[3].astype("float64"))
    leaves = [leaf(values, given=True) for values in given[:3]]
    buffers = [each.grad_buffer for each in leaves]
    made = ops.linear(leaves[0], leaves[1], leaves[2] if biased else None, activation)
    made.backward(put(given[3]))
    for there, here, buffer in list(zip(leaves, wide, buffers))[:2 + biased]:
        close(there.grad, here.grad)
        assert there is leaves[0] or there.grad is buffer


def test_a_layer_is_one_launch_forward_and_its_gradients_two_with_the_library() -> None:
    x, (weight, bias) = leaf(numbers(70, 21)), (leaf(values, given=True) for values in (numbers(13, 21), numbers(13)))
    with counted() as forward:
        made = ops.linear(x, weight, bias)
    grad = put(numbers(70, 13))
    with counted() as backward:
        made.backward(grad)
    assert (dict(forward.launches), dict(backward.launches)) == ({"product": 1}, {"product": 2})
    assert (forward.n_syncs, backward.n_syncs) == (0, 0)


def test_gelu_by_tanh_is_in_the_product_where_no_gradient_follows() -> None:
    x, weight, bias = Tensor(put(numbers(7, 21))), Tensor(put(numbers(13, 21))), Tensor(put(numbers(13)))
    with counted() as counts:
        found = ops.linear(x, weight, bias, "gelu_tanh")
    assert dict(counts.launches) == {"product": 1}
    wanted = ops.linear(*[values.astype("float64") for values in (numbers(7, 21), numbers(13, 21), numbers(13))], "gelu_tanh")
    close(found.array, wanted.array)


@pytest.mark.parametrize("bias", [True, False])
def test_a_weight_that_is_used_again_gets_its_second_gradient_added_by_the_product(way: None, bias: bool) -> None:
    values, x = numbers(21, 21), [numbers(70, 21, seed=i) for i in (1, 2)]
    weight, b = leaf(values, given=True), leaf(numbers(21), given=True)
    buffer = weight.grad_buffer

    def loss(weight: Any, b: Any, x: list[Any]) -> Any:
        middle = ops.linear(x[0], weight, b if bias else None) + x[1]
        return (ops.matmul(ops.linear(middle, weight, b if bias else None, "tanh"), weight) ** 2).sum()

    wide = [Tensor(each.astype("float64"), requires_grad=True) for each in (values, numbers(21))]
    loss(*wide, [each.astype("float64") for each in x]).backward()
    made = loss(weight, b, [put(each) for each in x])
    with counted() as counts:
        made.backward()
    close(weight.grad, wide[0].grad)
    assert weight.grad is buffer
    if bias:
        close(b.grad, wide[1].grad)
    assert counts.launches["iadd"] == bias                       # of the second bias alone


def test_a_layer_and_its_gradients_are_captured_in_a_graph(way: None) -> None:
    x, weight, bias = put(numbers(35, 21)), leaf(numbers(13, 21), given=True), leaf(numbers(13), given=True)
    grad = put(numbers(35, 13))
    ops.linear(x, weight, bias, "relu").backward(grad)
    weight.grad = bias.grad = None
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        made = ops.linear(x, weight, bias, "relu")
        made.backward(grad)
        graph = stream.end_capture()
    for seed in (5, 6):
        x[...] = put(numbers(35, 21, seed=seed))
        graph.launch()
        before = numbers(35, 21, seed=seed).astype("float64") @ numbers(13, 21).T + numbers(13)
        close(made.array, before.clip(0))
        close(weight.grad, np.where(before > 0, numbers(35, 13), 0).T @ numbers(35, 21, seed=seed))


def test_a_second_backward_adds_to_what_the_first_has_left() -> None:
    weight, x = leaf(numbers(13, 21)), put(numbers(7, 21))
    for _ in range(3):
        ops.linear(x, weight).backward(put(np.ones((7, 13), "float32")))
    close(weight.grad, 3 * np.tile(x.get().sum(axis=0), (13, 1)))


@pytest.mark.parametrize("given", [True, False])
def test_a_table_that_is_the_heads_matrix_too_gets_its_rows_gradients_added_in_place(given: bool) -> None:
    """One index comes more often than the kernel adds up at once, some rows never."""
    values, indices = numbers(19, 8), np.random.default_rng(4).integers(0, 13, (5, 70))
    indices[:3] = 2
    upstream, wide = numbers(5, 70, 19, seed=5), Tensor(values.astype("float64"), requires_grad=True)
    ops.linear(ops.embedding(indices, wide), wide).backward(upstream.astype("float64"))
    table = leaf(values, given)
    buffer = table.grad_buffer
    made = ops.linear(ops.embedding(put(indices), table), table)
    with counted() as counts:
        made.backward(put(upstream))
    close(table.grad, wide.grad)
    assert not given or table.grad is buffer
    assert not {"iadd", "add", "zeros", "setitem"} & set(counts.launches), counts.launches


def test_an_operation_that_returns_the_very_gradient_of_a_leaf_is_still_added() -> None:
    x = leaf(numbers(5, 5))
    x.reshape(5, 5).backward(put(np.ones((5, 5), "float32")))
    x.reshape(5, 5).backward(x.grad)
    close(x.grad, np.full((5, 5), 2.0))


@pytest.mark.parametrize(("left", "right"), [((2, 3, 7, 21), (2, 3, 21, 5)), ((2, 1, 7, 21), (3, 21, 5)), ((4, 7, 21), (21, 5)),
                                             ((7, 21), (2, 21, 5)), ((21,), (2, 21, 5)), ((2, 7, 21), (21,)), ((21,), (21, 5))])
def test_products_of_batches_and_their_gradients(way: None, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    given = numbers(*left), numbers(*right, seed=1)
    wide = [Tensor(values.astype("float64"), requires_grad=True) for values in given]
    there = [leaf(values) for values in given]
    (ops.matmul(*wide) ** 2).sum().backward()
    (ops.matmul(*there) ** 2).sum().backward()
    for found, wanted in zip(there, wide):
        close(found.grad, wanted.grad)


def test_gradients_that_meet_on_a_device_are_added_in_place() -> None:
    x = leaf(numbers(40, 8))
    y = ops.tanh(x)
    made = (ops.tanh(y) + ops.sigmoid(y) + ops.relu(y)).sum()
    with counted() as counts:
        made.backward()
    assert counts.launches["iadd"] == 2 and counts.launches["add"] == 0
    wide = Tensor(numbers(40, 8).astype("float64"), requires_grad=True)
    y = ops.tanh(wide)
    (ops.tanh(y) + ops.sigmoid(y) + ops.relu(y)).sum().backward()
    close(x.grad, wide.grad)


def test_memory_on_a_device_is_private_where_nobody_else_shows_it() -> None:
    whole: Any = put(numbers(6, 4))
    assert isinstance(whole, DeviceArray) and is_private(whole)
    view = whole.reshape(4, 6)
    assert not is_private(view)                                   # `whole` is still there
    del whole
    assert is_private(view) and not is_private(view[:, 1:])
