"""Sums over many rows have the rounding errors of a few: those of PyTorch, or less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor
from mpitrain.kernels.sums import EXACT, column_sums, row_sums, sum_over, sum_rows
from mpitrain.kernels.variances import variances

torch = pytest.importorskip("torch")
ROWS = 50_003


def error(found: Any, exact: Any) -> float:
    return float(np.abs(np.asarray(found, np.float64) - exact).max() / np.abs(exact).max())


def uniform(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, np.float32)


@pytest.mark.parametrize(("shape", "dim"), [((ROWS, 16), 0), ((ROWS, 7), 0), ((ROWS, 1), 0), ((ROWS,), 0), ((16, ROWS), 1),
                                            ((ROWS // 10, 3, 10), (0, 2)), ((10, ROWS // 10, 5), (0, 1)), ((ROWS, 40), None)])
@pytest.mark.parametrize("layout", ["C", "F", "every other"])
@pytest.mark.parametrize("name", ["sum", "mean", "var"])
def test_sums_means_and_variances_are_as_exact_as_pytorchs(name: str, shape: tuple[int, ...], dim: Any, layout: str) -> None:
    x = uniform(*shape)
    x = np.asarray(x, order="F") if layout == "F" else np.repeat(x, 2, axis=-1)[..., ::2] if layout == "every other" else x
    options = {"correction": 1} if name == "var" else {}
    found = getattr(ops, name)(x, dim).array
    exact = getattr(torch, name)(torch.tensor(x, dtype=torch.float64), dim=dim, **options).numpy()
    theirs = getattr(torch, name)(torch.tensor(x), dim=dim, **options).numpy()
    assert found.shape == exact.shape and found.dtype == np.float32
    assert error(found, exact) <= max(4 * error(theirs, exact), 5e-7)


@pytest.mark.parametrize("columns", [2, 3, 4, 5, 8, 16, 17, 33, 600])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_columns_are_added_in_one_order(columns: int, dtype: str) -> None:
    x = np.random.default_rng(1).random((EXACT + 77, columns)).astype(dtype)
    out = np.empty(columns, dtype)
    assert column_sums(x, out).tobytes() == column_sums.reference(x, out.copy()).tobytes()
    assert error(out, x.sum(axis=0, dtype=np.longdouble)) < (1e-6 if dtype == "float32" else 1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_along_memory_have_the_bits_of_numpy(dtype: str) -> None:
    x = np.random.default_rng(2).standard_normal(1_000_100).astype(dtype)
    for n in (*range(1, 1200), *range(1200, 5000, 37), 99_999, 524_288, 1_047_552, *range(1_000_000, 1_000_017)):
        n = min(n, x.size)
        assert row_sums(x[:n].reshape(1, n)).tobytes() == np.sum(x[:n]).tobytes(), n
    for rows in (1, 3, 8, 17):
        for n in (1, 7, 8, 9, 16, 100, 127, 128, 129, 257, 1023, 1025, 5001):
            for matrix in (x[:rows * n].reshape(rows, n), -np.zeros((rows, n), dtype), np.full((rows, n), np.inf, dtype)):
                assert row_sums(matrix).tobytes() == matrix.sum(axis=1).tobytes(), (rows, n)


@pytest.mark.parametrize(("shape", "dims"), [((70, 120), 1), ((70, 120), None), ((70, 120), 0), ((9100, 1), 0), ((9100,), 0),
                                             ((7, 11, 5, 17), (2, 3)), ((7, 11, 13, 17), 3), ((7, 11, 13, 17), (0, 1)),
                                             ((70, 3, 4, 9), (1, 2, 3)), ((7, 1, 300, 5), (1, 3)), ((100, 100, 1), 1)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_sums_over_few_rows_in_any_order_of_memory_have_the_bits_of_numpy(shape: Any, dims: Any, keepdims: bool) -> None:
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    for turned in (x, np.asfortranarray(x), np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -1)), -1, 0)):
        found, known = sum_over(turned, dims, keepdims), turned.sum(axis=dims, keepdims=keepdims)
        assert found.shape == known.shape and np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(known).tobytes()


def test_a_sum_over_a_dim_of_one_number_is_a_new_array_with_the_bits_of_numpy() -> None:
    x = -np.zeros((EXACT + 1, 1, 2), np.float32)
    x[3] = np.nan
    found = sum_over(x, 1)
    assert found.tobytes() == x.sum(axis=1).tobytes() and not np.shares_memory(found, x)


@pytest.mark.parametrize("shape", [(1, 5003, 1), (17, 3, 1), (17, 100, 1), (9, 200, 1), (9, 511, 1), (2, 1030, 1), (1, 63, 2),
                                   (2, 200, 4), (3, 129, 5), (2, 70, 8), (1, 70, 16), (2, 65, 600), (0, 5, 3), (4, 3, 0)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_variances_have_one_order(shape: tuple[int, ...], dtype: str) -> None:
    x = (5 + np.random.default_rng(4).standard_normal(shape)).astype(dtype)
    for found, known in zip(variances(x), variances.reference(x), strict=True):
        assert found.dtype == np.float64 and found.tobytes() == known.tobytes()


@pytest.mark.parametrize("dims", [None, 0, 1, -1, (0, 1), (0, 3), (1, 3), (0, 1, 3)])
@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_variances_are_right_to_the_last_digit_over_any_dims(dims: Any, layout: tuple[int, ...], keepdim: bool) -> None:
    x = np.transpose(3 + uniform(5, 12, 40, 7), layout)
    for given in (x, x[:, ::-1, ::2], np.broadcast_to(x[:1], x.shape)):
        if given.strides[0] == 0 and dims == 0:
            continue                              # equal numbers
        exact = given.var(axis=dims, dtype="float64", ddof=1, keepdims=keepdim)
        found = ops.var(given, dims, keepdim=keepdim).array
        assert found.shape == exact.shape and found.dtype == np.float32
        np.testing.assert_allclose(found, exact, rtol=6e-8)


def test_up_to_so_many_rows_the_bits_are_those_of_numpy() -> None:
    x = uniform(EXACT, 33)
    assert sum_rows(x).tobytes() == x.sum(axis=0).tobytes()
    assert sum_over(x[:128], 0).tobytes() == x[:128].sum(axis=0).tobytes()


@pytest.mark.parametrize("shape", [(129, 2), (300, 16), (1000, 1000), (4096, 33), (2, 3000, 8)])
def test_sums_and_means_over_leading_dims_are_as_exact_as_pytorchs(shape: tuple[int, ...]) -> None:
    x = uniform(*shape)
    dim = len(shape) - 2
    for ours, theirs in ((ops.sum, torch.sum), (ops.mean, torch.mean)):
        exact = getattr(x, ours.__name__)(axis=dim, dtype="float64")
        assert error(ours(x, dim).array, exact) <= 4 * error(theirs(torch.tensor(x), dim).numpy(), exact)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients_of_biases_are_as_exact(activation: str | None) -> None:
    x, w, b = (Tensor(a, requires_grad=True) for a in (uniform(ROWS, 4), uniform(16, 4), uniform(16)))
    ops.sum(ops.linear(x, w, b, activation=activation) if activation else ops.linear(x, w, b)).backward()
    theirs = [torch.tensor(t.array, requires_grad=True, dtype=torch.float64) for t in (x, w, b)]
    made = torch.nn.functional.linear(*theirs)
    (made if activation is None else getattr(torch.nn.functional, activation)(made)).sum().backward()
    assert error(b.grad, theirs[2].grad.numpy()) < 5e-7


def test_the_gradient_of_what_was_broadcast_is_as_exact() -> None:
    bias = Tensor(np.zeros(5, np.float32), requires_grad=True)
    weights = uniform(ROWS, 5)
    ops.sum((Tensor(np.zeros((ROWS, 5), np.float32)) + bias) * weights).backward()
    assert error(bias.grad, weights.sum(axis=0, dtype="float64")) < 5e-7
