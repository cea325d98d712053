"""Choosing experts, moving rows and multiplying by expert: against loops over rows, PyTorch and differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.parity import check, check_gradient, normal, torch

from mpitrain import ops
from mpitrain.autograd import Tensor, part_of_batch
from mpitrain.errors import ShapeError
from mpitrain.kernels import experts as kernels
from mpitrain.ops.experts import Route, balance_value, route

ROWS, EXPERTS, TOP_K, CAPACITY, WIDTH = 11, 4, 2, 4, 5


def some_route(capacity: int = CAPACITY, top_k: int = TOP_K, seed: int = 0) -> Route:
    """One in which some rows find no place, and some places stay empty."""
    found = route(np.random.default_rng(seed).standard_normal((ROWS, EXPERTS)), top_k, capacity)
    assert (found.slots < 0).any() and (found.sources < 0).any()
    return found


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("capacity", [1, 3, ROWS])
def test_places_are_given_in_the_order_of_choices_and_rows(top_k: int, capacity: int) -> None:
    scores = np.random.default_rng(top_k).integers(0, 5, (ROWS, EXPERTS)).astype(float)         # with ties
    found = route(scores, top_k, capacity)
    taken: dict[int, list[int]] = {e: [] for e in range(EXPERTS)}
    ranked = [sorted(range(EXPERTS), key=lambda e: (-row[e], e)) for row in scores]
    for k in range(top_k):
        for t in range(ROWS):
            e = ranked[t][k]
            fits = len(taken[e]) < capacity
            assert found.chosen[t, k] == e and found.slots[k, t] == (e * capacity + len(taken[e]) if fits else -1)
            taken[e] += [t] * fits
    for e, rows in taken.items():
        places = slice(e * capacity, (e + 1) * capacity)
        assert found.tokens[places].tolist() == rows + [-1] * (capacity - len(rows))
    assert found.counts.tolist() == [sum(e in row[:top_k] for row in ranked) for e in range(EXPERTS)]


def test_rows_come_back_from_their_experts_times_their_gates() -> None:
    to, x, y, weights = some_route(), normal(ROWS, WIDTH), normal(EXPERTS, CAPACITY, 3), normal(TOP_K, ROWS)
    there = ops.dispatch(x, to).array
    back = ops.combine(y, weights, to).array
    expected = np.zeros((ROWS, 3))
    for k in range(TOP_K):
        for t in range(ROWS):
            if to.slots[k, t] >= 0:
                e, place = divmod(to.slots[k, t], CAPACITY)
                np.testing.assert_array_equal(there[e, place], x[t])
                expected[t] += weights[k, t] * y[e, place]
    np.testing.assert_allclose(back, expected, rtol=1e-14)
    assert not there.reshape(-1, WIDTH)[to.sources < 0].any()


def test_a_place_that_is_not_finite_spoils_no_row_that_has_none() -> None:
    to, y = some_route(), normal(EXPERTS, CAPACITY, 3)
    y[0, 0] = np.nan
    dropped = (to.slots < 0).all(axis=0)
    assert dropped.any()
    assert not ops.combine(y, normal(TOP_K, ROWS), to).array[dropped].any()


def test_gradients_of_moving_rows_equal_differences() -> None:
    to = some_route()
    check_gradient(lambda x: ops.dispatch(x, to), (ROWS, WIDTH))
    check_gradient(lambda x, g: ops.combine(x, g, to), (EXPERTS, CAPACITY, WIDTH), (TOP_K, ROWS))
    for normalised in (True, False):
        check_gradient(lambda s, n=normalised: ops.expert_gates(ops.softmax(s), to, normalised=n), (ROWS, EXPERTS))


@pytest.mark.parametrize("activation", [None, "gelu", "relu", "tanh"])
@pytest.mark.parametrize("shape", [(3, 5, 4, 6), (2, 1, 3, 1), (1, 40, 128, 256)])
def test_products_by_expert_equal_torch(activation: str | None, shape: tuple[int, ...]) -> None:
    e, c, i, o = shape

    def theirs(x: Any, w: Any, b: Any) -> Any:
        y = torch.einsum("eci,eoi->eco", x, w) + b[:, None]
        return y if activation is None else getattr(torch.nn.functional, activation)(y)

    check(lambda x, w, b: ops.expert_linear(x, w, b, activation), theirs, (e, c, i), (e, o, i), (e, o))
    check(lambda x, w: ops.expert_linear(x, w), lambda x, w: torch.einsum("eci,eoi->eco", x, w), (e, c, i), (e, o, i))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradients_of_products_by_expert_equal_differences(activation: str | None) -> None:
    check_gradient(lambda x, w, b: ops.expert_linear(x, w, b, activation), (3, 5, 4), (3, 6, 4), (3, 6))


def test_the_gradients_of_experts_are_written_into_the_given_memory() -> None:
    weight, bias = (Tensor(np.ones(shape, np.float32), requires_grad=True) for shape in ((2, 5, 4), (2, 5)))
    weight.grad_buffer, bias.grad_buffer = np.full((2, 5, 4), np.nan, np.float32), np.full((2, 5), np.nan, np.float32)
    ops.sum(ops.expert_linear(np.ones((2, 3, 4), np.float32), weight, bias)).backward()
    assert weight.grad is weight.grad_buffer and bias.grad is bias.grad_buffer
    assert (weight.grad == 3).all() and (bias.grad == 3).all()


def test_the_balance_has_the_gradient_of_its_value_and_the_scale_of_the_micro_batch() -> None:
    """Against PyTorch's derivative of the value; the scores themselves pass unchanged."""
    if torch is None:
        pytest.skip("PyTorch is not installed")
    to, logits, grad = some_route(), normal(ROWS, EXPERTS), normal(ROWS, EXPERTS, seed=1)
    theirs = torch.tensor(logits, requires_grad=True)
    scores = torch.softmax(theirs, dim=1)
    shares = torch.tensor(np.bincount(to.chosen.reshape(-1), minlength=EXPERTS) / to.assigned)
    value = EXPERTS * (shares * scores.mean(dim=0)).sum()
    ((scores * torch.tensor(grad)).sum() + 0.3 * 0.25 * value).backward()

    x = Tensor(logits, requires_grad=True)
    ours = ops.softmax(x)
    assert float(balance_value(ours, to)) == pytest.approx(value.item(), rel=1e-14)
    passed = ops.expert_balance(ours, to, 0.3)
    np.testing.assert_array_equal(passed.array, ours.array)
    with part_of_batch(lambda: 0.25):
        passed.backward(grad)
    np.testing.assert_allclose(x.grad, theirs.grad.numpy(), rtol=1e-12)


def test_sums_over_choices_have_the_same_bits_each_time() -> None:
    to, y, weights = some_route(), normal(EXPERTS, CAPACITY, 3).astype(np.float32), normal(TOP_K, ROWS).astype(np.float32)
    first = kernels.add_rows(y.reshape(-1, 3), to.slots, weights)
    assert all((kernels.add_rows(y.reshape(-1, 3), to.slots, weights) == first).all() for _ in range(3))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: route(normal(3, 2), 3, 1), r"route: scores of shape \(3, 2\), 3 choices and 1 places"),
    (lambda: route(normal(0, 2), 1, 1), r"route: scores of shape \(0, 2\)"),
    (lambda: ops.dispatch(normal(3, 2), some_route()), r"dispatch: rows of shape \(3, 2\) for a route of 11 rows"),
    (lambda: ops.combine(normal(4, 3, 2), normal(2, 11), some_route()), r"combine: places of shape \(4, 3, 2\) and gates"),
    (lambda: ops.expert_linear(normal(3, 2, 4), normal(3, 5, 2)), r"expert_linear: an input of shape \(3, 2, 4\) does not fit"),
    (lambda: ops.expert_linear(normal(3, 2, 4), normal(3, 5, 4), normal(3, 4)), r"expert_linear: a bias of shape \(3, 4\) does"),
    (lambda: ops.expert_linear(normal(3, 2, 4), normal(3, 5, 4), None, "square"), 'expert_linear: activation is None or one of'),
])
def test_what_does_not_fit_is_named(call: Any, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call()
