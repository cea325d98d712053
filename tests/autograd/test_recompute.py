"""Gradient checkpointing: the same gradients, less memory, hooks at the right moment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from autograd.leaves import leaf, trained

from mpitrain import ops
from mpitrain.autograd import Tensor, no_grad, recompute, recomputing
from mpitrain.backend import random
from mpitrain.errors import GraphError


def gradients(build: Any, *tensors: Tensor) -> list[np.ndarray]:
    for t in tensors:
        t.grad = None
    ops.sum(build()).backward()
    return [t.grad for t in tensors]


def assert_same(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


def test_a_recomputed_block_gives_the_same_bits() -> None:
    x, w, b = leaf(1.0, 2.0, 3.0), trained(3, 3), trained(3)
    def block(t: Tensor) -> Tensor:
        return ops.gelu(ops.linear(t, w, b)) * t
    assert_same(gradients(lambda: block(x), x, w, b), gradients(lambda: recompute(block, x), x, w, b))


def test_blocks_nest() -> None:
    x, w, v = leaf(1.0, 2.0, 3.0), trained(3, 3), trained(3, 3, seed=1)
    def inner(t: Tensor) -> Tensor:
        return ops.tanh(ops.linear(t, w))
    def outer(t: Tensor) -> Tensor:
        return ops.linear(recompute(inner, ops.linear(t, v)), w)
    def plain(t: Tensor) -> Tensor:
        return ops.linear(inner(ops.linear(t, v)), w)
    assert_same(gradients(lambda: plain(x), x, w, v), gradients(lambda: recompute(outer, x), x, w, v))


def test_hooks_run_once_inside_a_block_as_soon_as_the_parameter_is_final() -> None:
    """The block's last layer is final before its first layer has run; a parameter also used outside is final there."""
    x, first, last, shared = leaf(1.0, 2.0), trained(2, 2), trained(2, 2, seed=1), trained(2, seed=2)
    order: list[str] = []
    for name, p in (("first", first), ("last", last), ("shared", shared)):
        p.grad_hooks.append(lambda t, name=name: order.append(name))
    def block(t: Tensor) -> Tensor:
        return ops.linear(ops.tanh(ops.linear(t, first)) * shared, last)
    ops.sum(recompute(block, x * shared)).backward()
    assert order == ["last", "first", "shared"]


def test_nested_blocks_run_hooks_once() -> None:
    x, w = leaf(1.0, 2.0), trained(2, 2)
    seen: list[np.ndarray] = []
    w.grad_hooks.append(lambda t: seen.append(t.grad.copy()))
    def inner(t: Tensor) -> Tensor:
        return ops.tanh(ops.linear(t, w))
    ops.sum(recompute(lambda t: recompute(inner, recompute(inner, t)), x)).backward()
    assert len(seen) == 1 and np.array_equal(seen[0], w.grad)


def test_a_parameter_handed_in_as_an_argument_counts_as_the_blocks_own() -> None:
    x, w = leaf(1.0, 2.0), trained(2, 2)
    seen: list[Any] = []
    w.grad_hooks.append(seen.append)
    def block(t: Tensor, weight: Tensor) -> Tensor:
        return ops.tanh(ops.linear(t, weight))
    expected = gradients(lambda: block(x, w), x, w)
    seen.clear()
    assert_same(expected, gradients(lambda: recompute(block, x, w), x, w))
    assert len(seen) == 1


def test_a_block_may_have_several_results() -> None:
    x = leaf(1.0, 2.0)
    def block(t: Tensor) -> tuple[Tensor, Tensor]:
        return ops.exp(t), t * t
    def use(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]
    assert_same(gradients(lambda: use(block(x)), x), gradients(lambda: use(recompute(block, x)), x))


def test_random_numbers_repeat() -> None:
    keys: list[int] = []
    def block(t: Tensor) -> Tensor:
        keys.append(random.current().key("dropout"))
        return t * 2.0
    with random.use(random.Scope(seed=1, step=2)):
        y = recompute(block, leaf(1.0))
        random.current().key("dropout")
    y.backward()
    assert len(keys) == 2 and keys[0] == keys[1]


def test_a_block_knows_when_it_runs_again() -> None:
    seen: list[bool] = []
    def block(t: Tensor) -> Tensor:
        seen.append(recomputing())
        return t * 2.0
    recompute(block, leaf(1.0)).backward()
    assert seen == [False, True]


def test_without_recording_a_block_just_runs() -> None:
    with no_grad():
        y = recompute(lambda t: t * 2.0, leaf(3.0))
    assert y.item() == 6 and not y.requires_grad


def test_a_block_that_gives_other_shapes_the_second_time_is_refused() -> None:
    sizes = iter([2, 3])
    y = recompute(lambda t: ops.broadcast_to(t, (next(sizes), 1)) * 1.0, leaf(1.0))
    with pytest.raises(GraphError, match="recomputing a block gave results of other shapes than its first run"):
        ops.sum(y).backward()


def test_a_block_that_uses_another_parameter_the_second_time_is_refused() -> None:
    choices = iter([trained(1), trained(1, seed=1)])
    y = recompute(lambda t: t * next(choices), leaf(1.0))
    with pytest.raises(GraphError, match="recomputing a block used a parameter that its first run did not"):
        ops.sum(y).backward()


@pytest.mark.parametrize("detached", [False, True])
def test_a_block_whose_parameter_was_changed_before_it_runs_again_is_refused(detached: bool) -> None:
    w = trained(2)
    y = recompute(lambda t: t * (w.detach() if detached else w), leaf(1.0, 2.0))
    with no_grad():
        w[0] = 7.0
    with pytest.raises(GraphError, match=r"^Recompute: a parameter that the block reads again in backward was changed in place "
                                         r"\(1 changes since\); copy it before changing it$"):
        ops.sum(y).backward()
