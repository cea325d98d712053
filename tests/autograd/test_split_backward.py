"""Backward as two calls: activations first, parameters later; the sum of both is one backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from autograd.leaves import leaf, trained

from mpitrain import ops
from mpitrain.autograd import Context, Deferred, Function, Tensor, recompute, run_backward
from mpitrain.errors import GraphError


def network(seed: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """An input, the parameters (one of them used twice), and a loss."""
    x = leaf(0.5, -1.0, 2.0)
    w, b, v = trained(3, 3, seed=seed), trained(3, seed=seed + 1), trained(3, 3, seed=seed + 2)
    h = ops.tanh(ops.linear(x, w, b))
    h = ops.gelu(ops.linear(h, v))
    return x, [w, b, v], ops.sum(ops.linear(h, w) * h)


def test_two_calls_give_the_bits_of_one() -> None:
    x, parameters, loss = network(1)
    loss.backward()
    x2, parameters2, loss2 = network(1)
    deferred = run_backward(loss2, split=True)
    assert isinstance(deferred, Deferred)
    assert np.array_equal(x.grad, x2.grad) and all(p.grad is None for p in parameters2)
    deferred.run()
    for p, q in zip(parameters, parameters2):
        assert p.grad.tobytes() == q.grad.tobytes()


def test_hooks_of_parameters_run_in_the_second_call_once() -> None:
    _, parameters, loss = network(2)
    seen: list[int] = []
    for i, p in enumerate(parameters):
        p.grad_hooks.append(lambda t, i=i: seen.append(i))
    deferred = run_backward(loss, split=True)
    assert seen == []
    deferred.run()
    assert sorted(seen) == [0, 1, 2] and seen[0] == 2       # the weight of the later layer is final first


def test_saved_arrays_are_released_after_the_second_call_and_not_before() -> None:
    held: list[Context] = []

    class Holding(Function):
        @staticmethod
        def forward(ctx: Context, x: Any, w: Any) -> Any:
            ctx.save(x, w)
            held.append(ctx)
            return x * w

        @staticmethod
        def backward(ctx: Context, grad: Any) -> Any:
            x, w = ctx.saved
            return grad * w if ctx.needs[0] else None, grad * x if ctx.needs[1] else None

    w = trained(2)
    deferred = run_backward(ops.sum(Holding.apply(leaf(1.0, 2.0), w)), split=True)
    assert len(held[0].saved) == 2
    deferred.run()
    with pytest.raises(GraphError, match="Holding: backward ran twice"):
        held[0].saved  # noqa: B018
    assert w.grad.tolist() == [1, 2]


def test_the_second_call_runs_once() -> None:
    deferred = run_backward(network(3)[2], split=True)
    deferred.run()
    with pytest.raises(GraphError, match="the second half of a split backward ran twice"):
        deferred.run()


def test_a_recomputed_block_defers_its_parameters_too() -> None:
    w = trained(3, 3)
    x, x2 = leaf(1.0, 2.0, 3.0), leaf(1.0, 2.0, 3.0)
    ops.sum(ops.tanh(ops.linear(x, w))).backward()
    expected, w.grad = w.grad, None
    seen: list[Any] = []
    w.grad_hooks.append(seen.append)
    deferred = run_backward(ops.sum(recompute(lambda t: ops.tanh(ops.linear(t, w)), x2)), split=True)
    assert np.array_equal(x.grad, x2.grad) and w.grad is None and seen == []
    deferred.run()
    assert np.array_equal(w.grad, expected) and len(seen) == 1


def test_a_recomputed_block_that_no_gradient_passes_through_gives_its_parameters_theirs() -> None:
    """The first block of a model: its input wants no gradient, so that the second call is the first that it gets."""
    w, x = trained(3, 3), Tensor(np.array([1.0, 2.0, 3.0]))
    ops.sum(ops.tanh(ops.linear(x, w))).backward()
    expected, w.grad = w.grad, None
    seen: list[Any] = []
    w.grad_hooks.append(seen.append)
    deferred = run_backward(ops.sum(recompute(lambda t: recompute(lambda u: ops.tanh(ops.linear(u, w)), t), x)), split=True)
    assert w.grad is None and seen == []
    deferred.run()
    assert np.array_equal(w.grad, expected) and len(seen) == 1


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_the_two_calls_multiply_as_often_as_one(monkeypatch: pytest.MonkeyPatch, activation: str | None) -> None:
    """Each product of a backward is for the input or for the weight, and only one of the calls makes it."""
    from mpitrain.ops import linalg
    made: list[tuple[int, ...]] = []

    def product(x: Any, y: Any, *rest: Any, **options: Any) -> Any:
        made.append((*x.shape, *y.shape))
        return real(x, y, *rest, **options)
    real = linalg.product
    monkeypatch.setattr(linalg, "product", product)

    def network() -> Any:
        rng = np.random.default_rng(0)
        weights = [trained(5, 3), trained(2, 5), trained(2, 4)]
        for weight in weights:
            weight.array[...] = rng.standard_normal(weight.shape)
        x = ops.linear(ops.linear(Tensor(np.ones((7, 3)), requires_grad=True), weights[0], activation=activation), weights[1])
        result = ops.sum(x @ weights[2])
        made.clear()
        return result
    run_backward(network())
    whole = list(made)
    deferred = run_backward(network(), split=True)
    first = list(made)
    made.clear()
    deferred.run()
    for_inputs, for_weights = {(7, 5, 5, 3), (7, 2, 2, 5), (7, 4, 4, 2)}, {(5, 7, 7, 3), (2, 7, 7, 5), (2, 7, 7, 4)}
    assert sorted(first + made) == sorted(whole) and set(first) == for_inputs and set(made) == for_weights
