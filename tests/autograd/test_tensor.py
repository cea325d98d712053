"""Tensor and Function: values, dtypes, devices, and the gradient check itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from autograd.leaves import leaf

from mpitrain import ops
from mpitrain.autograd import Context, Function, Tensor, enable_grad, grad_enabled, gradcheck, no_grad
from mpitrain.errors import GraphError, ShapeError


def test_lists_and_numbers_become_float32_and_arrays_keep_their_dtype() -> None:
    assert Tensor([1, 2]).dtype == np.float32 and Tensor(1.5).dtype == np.float32
    assert Tensor(np.ones(2)).dtype == np.float64 and Tensor(np.arange(2)).dtype == np.int64
    assert Tensor(np.float64(2)).dtype == np.float64


def test_only_floating_point_tensors_have_gradients() -> None:
    with pytest.raises(ShapeError, match="only floating-point and complex arrays have gradients, not int64"):
        Tensor(np.arange(3), requires_grad=True)


def test_data_is_the_same_memory_read_only() -> None:
    x = leaf(1.0, 2.0)
    assert np.shares_memory(x.data, x.array)
    with pytest.raises(ValueError, match="read-only"):
        x.data[0] = 5


def test_one_value_is_a_python_number_and_several_are_refused() -> None:
    assert leaf(2.5).item() == 2.5 and float(leaf(2.5)) == 2.5 and bool(Tensor(np.array([True])))
    with pytest.raises(ShapeError, match=r"item\(\) wants one value, this tensor has shape \(2,\)"):
        leaf(1.0, 2.0).item()
    with pytest.raises(ShapeError, match=r"the truth of a tensor of shape \(2,\) is ambiguous"):
        bool(leaf(1.0, 2.0))


def test_numpy_takes_tensors() -> None:
    assert np.asarray(leaf(1.0, 2.0)).tolist() == [1, 2] and np.allclose(leaf(1.0, 3.0), [1, 3])
    assert np.array(leaf(1.0), dtype=np.float32).dtype == np.float32 and len(leaf(1.0, 2.0)) == 2


def test_a_tensor_says_where_it_comes_from() -> None:
    assert repr(leaf(1.0)) == "Tensor([1.], dtype=float64, requires_grad)"
    assert repr(leaf(1.0) * 2.0) == "Tensor([2.], dtype=float64, from Multiply)"
    assert repr(leaf(1.0).detach()) == "Tensor([1.], dtype=float64)"


def test_an_array_on_the_left_of_an_operator_gives_a_tensor() -> None:
    x = leaf(1.0, 2.0)
    for y in (np.ones(2) + x, np.ones(2) - x, np.ones(2) * x, np.ones(2) / x, np.ones((2, 2)) @ x):
        assert isinstance(y, Tensor) and y.requires_grad


def test_operators_and_comparisons() -> None:
    x = leaf(1.0, 2.0)
    assert (-x).array.tolist() == [-1, -2] and (3 - x).array.tolist() == [2, 1] and (2 / x).array.tolist() == [2, 1]
    assert (x ** 2).array.tolist() == [1, 4] and (x @ x).item() == 5
    assert [(x < 2).array.tolist(), (x <= 2).array.tolist(), (x > 1).array.tolist(), (x >= 2).array.tolist()] == [
        [True, False], [True, True], [False, True], [False, True]]


def test_no_grad_and_enable_grad_nest_and_end_with_an_exception() -> None:
    x = leaf(1.0)
    with pytest.raises(KeyError), no_grad():
        assert not (x * 2.0).requires_grad
        with enable_grad():
            assert (x * 2.0).requires_grad
        assert not grad_enabled()
        raise KeyError
    assert grad_enabled()


def test_detach_shares_memory_and_its_changes_are_seen() -> None:
    x = leaf(1.0, 2.0)
    y = ops.sum(x * x)
    x.detach()[0] = 7.0
    with pytest.raises(GraphError, match="changed in place"):
        y.backward()


def test_a_tensor_made_of_another_shows_its_memory_and_its_changes() -> None:
    x = leaf(1.0, 2.0)
    y = ops.sum(leaf(3.0, 4.0) * Tensor(x))
    x.detach()[0] = 7.0
    with pytest.raises(GraphError, match="changed in place"):
        y.backward()


def test_the_advice_is_that_of_the_change_that_was_one_too_many() -> None:
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    x.mark_changed("wait for it")
    product = ops.sum(y * x)
    x.mark_changed()
    with pytest.raises(GraphError, match=r"\(1 changes since\); copy it before changing it$"):
        product.backward()
    product = ops.sum(y * x)
    x.mark_changed("wait for it")
    x.mark_changed()
    with pytest.raises(GraphError, match=r"\(2 changes since\); wait for it$"):
        product.backward()


def test_a_promotion_in_forward_is_refused() -> None:
    class Promoting(Function):
        @staticmethod
        def forward(ctx: Context, x: Any) -> Any:
            return x.astype(np.float64)

    with pytest.raises(ShapeError, match="Promoting: the result is float64, expected float32; a promotion crept in"):
        Promoting.apply(np.ones(2, np.float32))


def test_a_function_without_forward_or_backward_says_so() -> None:
    with pytest.raises(GraphError, match="a Function defines forward"):
        Function.apply(np.ones(2))

    class Half(Function):
        @staticmethod
        def forward(ctx: Context, x: Any) -> Any:
            return x + 0

    with pytest.raises(GraphError, match="Half: a Function defines backward or derivative"):
        Half.apply(leaf(1.0)).backward()


def test_gradcheck_notices_a_wrong_gradient_and_wants_float64() -> None:
    class Wrong(Function):
        @staticmethod
        def forward(ctx: Context, x: Any) -> Any:
            ctx.save(x)
            return x * x

        @staticmethod
        def backward(ctx: Context, grad: Any) -> Any:
            return grad * ctx.saved[0] * 2.001

    gradcheck(lambda x: ops.multiply(x, x), np.array([1.0, 2.0]))
    with pytest.raises(GraphError, match="gradcheck: backward gives .* along a random direction, differences of forward give"):
        gradcheck(lambda x: Wrong.apply(x), np.array([1.0, 2.0]))
    with pytest.raises(ShapeError, match="gradcheck wants float64 arrays"):
        gradcheck(lambda x: x, np.ones(2, np.float32))


@pytest.mark.parametrize("make, words", [
    (lambda: Tensor(2, 3), r"requires_grad is 3, expected True or False.*ops\.zeros\(2, 3\)"),  # type: ignore[arg-type]
    (lambda: Tensor(2, 0), "requires_grad is 0"),  # type: ignore[arg-type]
    (lambda: Tensor(None), "no real number"), (lambda: Tensor([1, None]), "no real number"),
    (lambda: Tensor("1.5"), "no real number"),
    (lambda: Tensor(np.array(["a"])), "<U1, which tensors do not have"), (lambda: Tensor(np.array([1, None])), "object"),
    (lambda: Tensor(np.float16(1)), "float16.*astype"), (lambda: Tensor(np.ones(2, "float16")), "float16.*astype"),
    (lambda: Tensor([leaf(1.0), leaf(2.0)]), r"whose gradients it would lose; write ops\.stack"),
    (lambda: Tensor([[1], [2, 3]]), "equal len")])
def test_what_no_tensor_holds_is_refused_in_one_line(make: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words) as told:
        make()
    assert "\n" not in str(told.value)


def test_a_truth_of_numpy_says_whether_a_gradient_is_required() -> None:
    assert Tensor(np.ones(1), np.bool_(True)).requires_grad and not Tensor(np.ones(1), np.bool_(False)).requires_grad
