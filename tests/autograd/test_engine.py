"""The engine's promises: any depth, program order, hooks at the last contribution, memory given back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from autograd.leaves import leaf, trained

from mpitrain import ops
from mpitrain.autograd import Backward, Context, Function, Tensor, no_grad, run_backward
from mpitrain.errors import GraphError, ShapeError


class Noted(Function):
    """x, and a note when its backward runs."""

    @staticmethod
    def forward(ctx: Context, x: Any, *, log: list[str], name: str) -> Any:
        ctx.log, ctx.name = log, name
        return x + 0

    @staticmethod
    def backward(ctx: Context, grad: Any) -> Any:
        ctx.log.append(ctx.name)
        return grad


def test_a_graph_20000_ops_deep_needs_no_recursion() -> None:
    x = leaf(1.0)
    y = x
    for _ in range(20_000):
        y = y + 1.0
    y.backward()
    assert y.item() == 20_001 and x.grad == 1


def test_dropping_a_deep_graph_without_backward_is_harmless() -> None:
    x = y = leaf(1.0)
    for _ in range(20_000):
        y = y + 1.0
    bottom = weakref.ref(x)                                   # the deepest node holds it
    del x
    assert bottom() is not None
    del y
    gc.collect()
    assert bottom() is None


def test_nodes_run_latest_first_whatever_the_shape_of_the_graph() -> None:
    log: list[str] = []
    x = leaf(1.0)
    a = Noted.apply(x, log=log, name="a")
    b = Noted.apply(x, log=log, name="b")
    c = Noted.apply(a, log=log, name="c")
    d = Noted.apply(c * b, log=log, name="d")
    (d * a).backward()
    assert log == ["d", "c", "b", "a"]


def test_a_tensor_used_twice_gets_the_sum() -> None:
    x = leaf(3.0)
    (x * x + x).backward()
    assert x.grad == 7


def test_gradients_add_up_over_backwards_until_they_are_cleared() -> None:
    x = leaf(3.0)
    (x * 2).backward()
    (x * 5).backward()
    assert x.grad == 7
    x.zero_grad()
    assert x.grad is None


def test_hooks_run_once_when_the_last_contribution_has_landed() -> None:
    """A weight used at both ends of the graph is final only when the early use is passed; another one before that."""
    order: list[tuple[str, float]] = []
    shared, late = leaf(2.0), leaf(5.0)
    shared.grad_hooks.append(lambda t: order.append(("shared", float(t.grad[0]))))
    late.grad_hooks.append(lambda t: order.append(("late", float(t.grad[0]))))
    log: list[str] = []
    h = Noted.apply(shared * 3.0, log=log, name="early")
    noted_before = lambda t: order.append(("early has run", float(len(log))))      # noqa: E731
    late.grad_hooks.append(noted_before)
    (h * late * shared).backward()
    assert order == [("late", 12.0), ("early has run", 0.0), ("shared", 2 * 3 * 2 * 5.0)]


def test_hooks_run_for_a_leaf_that_is_used_by_an_op_twice_only_once() -> None:
    seen: list[float] = []
    x = leaf(3.0)
    x.grad_hooks.append(lambda t: seen.append(float(t.grad[0])))
    (x * x).backward()
    assert seen == [6]


def test_a_leaf_without_a_contribution_keeps_no_gradient_and_its_hook_is_silent() -> None:
    seen: list[Any] = []
    x, y = leaf(1.0, 2.0), leaf(1.0)
    y.grad_hooks.append(seen.append)
    first, _ = ops.split(ops.concatenate([x, y]), [2, 1])
    ops.sum(first).backward()
    assert y.grad is not None and (y.grad == 0).all() and len(seen) == 1       # a zero did land here, through concatenate
    unused = leaf(1.0)
    unused.grad_hooks.append(seen.append)
    _, _ = ops.split(ops.concatenate([unused, unused]), 1)
    ops.sum(leaf(2.0) * 2).backward()
    assert unused.grad is None and len(seen) == 1


def test_a_backward_may_start_at_a_leaf() -> None:
    x = leaf(1.0)
    x.backward(np.array([4.0]))
    assert x.grad == 4


def test_what_nodes_saved_is_released_as_they_are_passed() -> None:
    class Marked(np.ndarray):
        """An array that a weak reference can point to."""

    alive: list[weakref.ref[Any]] = []

    class Saving(Function):
        @staticmethod
        def forward(ctx: Context, x: Any) -> Any:
            kept = np.array(x).view(Marked)
            alive.append(weakref.ref(kept))
            ctx.save(kept)
            return x * 1

        @staticmethod
        def backward(ctx: Context, grad: Any) -> Any:
            assert len(ctx.saved) == 1
            return grad

    log: list[int] = []
    y = Saving.apply(Saving.apply(leaf(1.0)))
    run_backward(y, progress=lambda: log.append(sum(ref() is not None for ref in alive)))
    assert log == [1, 0]


def test_a_second_backward_through_the_same_graph_is_refused() -> None:
    x = leaf(2.0)
    y = x * x
    y.backward()
    with pytest.raises(GraphError, match="Multiply: backward ran twice through the same graph; what it saved was released"):
        y.backward()


def test_an_array_changed_in_place_after_it_was_saved_is_refused() -> None:
    x, w = Tensor(np.ones(2)), leaf(1.0, 2.0)
    y = ops.sum(x * w)
    x.copy_(np.zeros(2))
    with pytest.raises(GraphError, match=r"Multiply: an array it saved for backward was changed in place \(1 changes since\)"):
        y.backward()


def test_an_output_changed_in_place_after_it_was_saved_is_refused() -> None:
    y = ops.exp(leaf(1.0, 2.0))
    z = ops.sum(y)
    with no_grad():
        y.copy_(np.zeros(2))
    with pytest.raises(GraphError, match="Exp: an array it saved"):
        z.backward()


def test_changing_a_leaf_in_place_is_refused_outside_no_grad() -> None:
    with pytest.raises(GraphError, match="changing a leaf that requires a gradient in place is not recorded"):
        leaf(1.0).copy_(np.zeros(1))


def test_a_parameter_is_looked_up_again_at_backward() -> None:
    """Sharded parameters come and go: backward uses the array that the parameter has then, and keeps none alive."""
    w, x = trained(3, 4), leaf(*range(4))
    y = ops.sum(ops.linear(x, w))
    w.array = w.array.copy() * 10                 # the same parameter, its values elsewhere; no change in place
    y.backward()
    assert np.allclose(x.grad, w.array.sum(axis=0))


@pytest.mark.parametrize(("grad", "message"), [
    (np.ones(3), r"Wrong: the gradient of input 0 is \(3,\) float64, the input is \(2,\) float64"),
    (np.ones(2, np.float32), r"Wrong: the gradient of input 0 is \(2,\) float32, the input is \(2,\) float64"),
])
def test_a_gradient_of_another_shape_or_dtype_names_the_op(grad: np.ndarray, message: str) -> None:
    class Wrong(Function):
        @staticmethod
        def forward(ctx: Context, x: Any) -> Any:
            return x + 0

        @staticmethod
        def backward(ctx: Context, _: Any) -> Any:
            return grad

    with pytest.raises(GraphError, match=message):
        Wrong.apply(leaf(1.0, 2.0)).backward(np.ones(2))


def test_a_wrong_number_of_gradients_names_the_op() -> None:
    class Wrong(Function):
        @staticmethod
        def forward(ctx: Context, x: Any, y: Any) -> Any:
            return x + y

        @staticmethod
        def backward(ctx: Context, grad: Any) -> Any:
            return grad

    with pytest.raises(GraphError, match="Wrong: backward returned 1 gradients for 2 inputs"):
        Wrong.apply(leaf(1.0), leaf(2.0)).backward()


def test_backward_asks_only_for_what_is_needed() -> None:
    asked: list[tuple[bool, ...]] = []

    class Asking(Function):
        @staticmethod
        def forward(ctx: Context, x: Any, y: Any, z: Any) -> Any:
            return x + y + z

        @staticmethod
        def backward(ctx: Context, grad: Any) -> Any:
            asked.append(ctx.needs)
            return grad, None, grad

    Asking.apply(leaf(1.0), np.ones(1), leaf(1.0)).backward()
    Asking.apply(np.ones(1), np.ones(1), leaf(1.0)).backward()
    assert asked == [(True, False, True), (False, False, True)]


def test_the_root_must_be_recorded_and_its_gradient_must_fit() -> None:
    with pytest.raises(GraphError, match="backward from a tensor that does not require a gradient"):
        Tensor(np.ones(1)).backward()
    with pytest.raises(ShapeError, match=r"backward from a tensor of shape \(2,\) needs the gradient of that shape"):
        (leaf(1.0, 2.0) * 2).backward()
    with pytest.raises(ShapeError, match=r"the gradient is \(3,\) float64, the tensor \(2,\) float64"):
        (leaf(1.0, 2.0) * 2).backward(np.ones(3))


def test_progress_is_called_after_each_node() -> None:
    calls: list[int] = []
    run_backward(ops.exp(leaf(1.0) * 2) + 1, progress=lambda: calls.append(1))
    assert len(calls) == 3


def test_gradients_land_in_the_given_memory_and_are_copied_nowhere_else() -> None:
    w = trained(3, 4)
    w.grad_buffer = np.full((3, 4), np.nan)
    (ops.sum(ops.linear(np.ones((2, 4)), w)) + ops.sum(ops.linear(np.ones((5, 4)), w))).backward()
    assert w.grad is w.grad_buffer and (w.grad == 7).all()


def test_a_leaf_does_not_share_its_gradient_with_another() -> None:
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    ops.sum(x + y).backward()
    x.grad += 5
    assert (y.grad == 1).all()


class Handing(Function):
    """x + y, whose backward hands out what `make(grad)` gives."""

    @staticmethod
    def forward(ctx: Context, x: Any, y: Any, *, make: Any) -> Any:
        ctx.make = make
        return x + y

    @staticmethod
    def backward(ctx: Context, grad: Any) -> Any:
        return ctx.make(grad)


def test_a_gradient_that_nobody_else_has_becomes_the_leafs_without_a_copy() -> None:
    made: list[int] = []

    def fresh(grad: Any) -> Any:
        arrays = grad * 2, (grad * 3).reshape(2, 1).reshape(2)
        made.extend(a.ctypes.data for a in arrays)
        return arrays
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    ops.sum(Handing.apply(x, y, make=fresh)).backward()
    assert [x.grad.ctypes.data, y.grad.ctypes.data] == made and x.grad.tolist() == [2, 2] and y.grad.tolist() == [3, 3]


def test_a_gradient_that_somebody_else_has_is_copied() -> None:
    mine = np.full((2, 2), 2.0)
    for make in (lambda grad: (mine[0], mine[1]), lambda grad: (mine[0], np.broadcast_to(grad[:1], 2)),
                 lambda grad: (np.frombuffer(bytearray(mine[0].tobytes())), np.ones(4)[::2])):
        x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
        ops.sum(Handing.apply(x, y, make=make)).backward()
        for gradient in (x.grad, y.grad):
            assert gradient.flags.owndata and gradient.flags.c_contiguous and gradient.flags.writeable
            gradient += 5
        assert (mine == 2).all()


def test_gradients_that_meet_are_added_in_place_only_where_nobody_else_has_them() -> None:
    kept: list[np.ndarray] = []

    def both(grad: Any) -> Any:
        kept.append(grad * 1)
        return kept[0], kept[0]
    x = leaf(1.0, 2.0)
    middle = x * 1.0
    ops.sum(Handing.apply(middle, middle, make=both)).backward()
    assert x.grad.tolist() == [2, 2] and kept[0].tolist() == [1, 1]
    x = leaf(1.0, 2.0)
    middle = x * 1.0
    ops.sum(ops.exp(middle) + ops.exp(middle) + ops.exp(middle)).backward()
    np.testing.assert_allclose(x.grad, 3 * np.exp([1.0, 2.0]), rtol=1e-6)


def test_nothing_is_recorded_during_backward() -> None:
    y = ops.exp(leaf(1.0))
    y.backward()
    x = leaf(1.0)
    run = Backward(None, False)
    seen: list[bool] = []
    x.grad_hooks.append(lambda t: seen.append((x * 2.0).requires_grad))
    z = x * 1.0
    run.run([(z, np.ones(1))])
    assert seen == [False] and (x * 2.0).requires_grad


def test_recording_is_as_before_when_one_object_was_entered_twice_and_in_decorated_functions() -> None:
    x, off = Tensor(np.ones(2), requires_grad=True), no_grad()
    with off, off:
        assert not (x * 2.0).requires_grad
    assert (x * 2.0).requires_grad

    @no_grad()
    def twice(again: bool) -> Tensor:
        return twice(False) if again else x * 2.0
    assert not twice(True).requires_grad
    assert (x * 2.0).requires_grad
