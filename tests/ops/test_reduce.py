"""Reductions against PyTorch and against differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ops.parity import apart, check, check_gradient, torch

from mpitrain import Tensor, ops
from mpitrain.errors import ShapeError

CASES = [((3, 4), None), ((3, 4), 0), ((3, 4), -1), ((2, 3, 4), (0, 2)), ((2, 3, 4), 1), ((), None), ((1,), 0), ((0, 3), 0),
         ((2, 0, 3), 1), ((2, 0, 3), 2), ((1, 5, 1), (0, 2))]
FILLED = [case for case in CASES if case[0] not in ((0, 3), (2, 0, 3))]


def theirs(name: str, dim: Any, keepdim: bool) -> Any:
    def reduce(x: Any) -> Any:
        dims = tuple(range(x.ndim)) if dim is None else dim
        if name in ("amax", "amin", "logsumexp", "sum", "mean"):
            return getattr(torch, name)(x, dims, keepdim) if x.ndim else getattr(torch, name)(x.reshape(1), 0)
        raise AssertionError(name)
    return reduce


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "dim"), CASES)
def test_sum_equals_torch(shape: tuple[int, ...], dim: Any, keepdim: bool) -> None:
    check(lambda x: ops.sum(x, dim, keepdim), theirs("sum", dim, keepdim), shape)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "dim"), FILLED)
def test_mean_extrema_and_logsumexp_equal_torch(shape: tuple[int, ...], dim: Any, keepdim: bool) -> None:
    check(lambda x: ops.mean(x, dim, keepdim), theirs("mean", dim, keepdim), shape)
    check(lambda x: ops.max(x, dim, keepdim), theirs("amax", dim, keepdim), shape)
    check(lambda x: ops.min(x, dim, keepdim), theirs("amin", dim, keepdim), shape)
    check(lambda x: ops.logsumexp(x, dim, keepdim), theirs("logsumexp", dim, keepdim), shape)


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize(("shape", "dim"), [((3, 4), None), ((3, 4), 0), ((2, 3, 4), (0, 2)), ((5,), 0)])
def test_var_equals_torch(shape: tuple[int, ...], dim: Any, correction: int) -> None:
    check(lambda x: ops.var(x, dim, correction=correction), lambda x: torch.var(x, dim, correction=correction), shape)
    check(lambda x: ops.var(x, dim, keepdim=True, correction=correction),
          lambda x: torch.var(x, dim, correction=correction, keepdim=True), shape)


def test_equal_extrema_share_the_gradient() -> None:
    check(lambda x: ops.max(x, 1), lambda x: torch.amax(x, 1), np.array([[1.0, 3, 3], [2, 2, 2]]))


def test_logsumexp_does_not_overflow_and_takes_minus_infinity() -> None:
    check(lambda x: ops.logsumexp(x, 1), lambda x: torch.logsumexp(x, 1), np.array([[1000.0, 999], [-1000, -1001], [-np.inf, 2]]))


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "var", "logsumexp"])
@pytest.mark.parametrize(("shape", "dim"), [((3, 4), None), ((3, 4), 1), ((2, 3, 4), (0, 2)), ((4, 1), 0)])
def test_gradients_equal_differences(name: str, shape: tuple[int, ...], dim: Any) -> None:
    check_gradient(lambda x: getattr(ops, name)(x, dim), apart(*shape))


def test_methods_and_functions_are_the_same() -> None:
    x = ops.add(np.arange(6.0).reshape(2, 3), 0)
    assert x.sum().item() == 15 and x.mean(1).array.tolist() == [1, 4] and x.sum(0, keepdim=True).shape == (1, 3)


@pytest.mark.parametrize(("name", "message"), [
    ("mean", r"mean over no elements: shape \(0, 2\), dim 0"), ("max", r"max over no elements: shape \(0, 2\), dim 0"),
    ("min", r"min over no elements: shape \(0, 2\), dim 0"), ("logsumexp", r"logsumexp over no elements: shape \(0, 2\), dim 0"),
    ("var", r"var with correction=1 over 0 elements: shape \(0, 2\), dim 0"),
])
def test_reducing_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        getattr(ops, name)(np.ones((0, 2)), 0)


def test_a_dim_that_is_not_there_is_named() -> None:
    with pytest.raises(ShapeError, match=r"dim 2 of an array with 2 dims, shape \(2, 3\)"):
        ops.sum(np.ones((2, 3)), 2)


def test_logsumexp_takes_infinity() -> None:
    check(lambda x: ops.logsumexp(x, 1), lambda x: torch.logsumexp(x, 1), np.array([[np.inf, 1.0], [0.0, 1.0]]), gradients=False)


@pytest.mark.parametrize("factors", [
    [1e30, 1e30, 1e-30, 1e-30], [1e-30, 1e-30, 1e30, 1e30], [1e30, 1e30, 0, 2], [1e20, 0, 1e20, 1e20], [1e20, 1e20, 1e-30],
    [1e38, 1e38, 1e-38, 1e-38], [0, 1e-30, 1e-30, 1e35], [3, 0, 0, 2]])
def test_the_gradient_of_a_product_overflows_only_where_it_is_too_large_itself(factors: list[float]) -> None:
    x = Tensor(np.array([factors, factors], np.float32), requires_grad=True)
    exact = x.array.astype(np.float64)
    ops.sum(ops.prod(x, dim=1) * np.array([1, -2], np.float32)).backward()
    wanted = [[g * np.prod(np.delete(row, k)) for k in range(len(row))] for g, row in zip((1, -2), exact)]
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(x.grad, np.array(wanted).astype(np.float32), rtol=2e-7)
