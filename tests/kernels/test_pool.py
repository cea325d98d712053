"""Pooling's loops in C where their vectors end: against the plain arrays that define them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.kernels.library import bind
from mpitrain.kernels.pool import NOWHERE, Side, window_maximum, window_maximum_gradient, window_total, window_total_gradient

SIZES = [(2, 2), (3, 5), (4, 31), (6, 32), (5, 33), (2, 34), (8, 64), (3, 71), (28, 28), (10, 10)]
DTYPES = ["float32", "float64"]


def side(size: int, kernel: int, stride: int) -> Side:
    starts = range(0, size - kernel + 1, stride)
    return Side(tuple(starts), tuple(start + kernel for start in starts), size)


def images(shape: tuple[int, ...], dtype: str) -> Any:
    """Small integers, so that many are equal, and some that are not numbers."""
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 3, shape).astype(dtype)
    x[rng.random(shape) < 0.02] = np.nan
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("window", [(2, 2), (3, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_largest_of_windows_and_their_gradient_equal_the_reference(size: tuple[int, int], window: tuple[int, int],
                                                                       relu: bool, dtype: str) -> None:
    size = max(size[0], window[0]), max(size[1], window[0])
    rows, columns = (side(n, *window) for n in size)
    x = images((2, 3, *size), dtype)
    largest, where = window_maximum(x, rows, columns, relu)
    wanted, place = window_maximum.reference(x, rows, columns, relu)
    np.testing.assert_array_equal(largest, wanted)
    np.testing.assert_array_equal(where, place)
    assert where.dtype == np.int32
    assert np.array_equal(where == NOWHERE, largest <= 0 if relu else np.zeros(where.shape, bool))
    grad = np.random.default_rng(1).standard_normal(largest.shape).astype(dtype)
    np.testing.assert_allclose(window_maximum_gradient(grad, where, rows, columns),
                               window_maximum_gradient.reference(grad, where, rows, columns), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_nothing_is_written_beyond_the_results(size: tuple[int, int], dtype: str) -> None:
    maximum, gradient = (bind("pool", name, signature) for name, signature in (
        ("maximum", "X:phw X!:pab I!:pab I I I I ip ih iw ia ib i"), ("maximum_gradient", "X:pab I:pab X!:phw ip ih iw ia ib i")))
    if maximum is None or gradient is None:
        pytest.skip("no C compiler")
    rows, columns = (side(n, 2, 2) for n in size)
    x = images((2, 3, *size), dtype)
    count, sizes = 6 * len(rows.starts) * len(columns.starts), (6, *size, len(rows.starts), len(columns.starts))
    y, where, dx = np.full(count + 64, 99, dtype), np.full(count + 64, 99, np.int32), np.full(x.size + 64, 99, dtype)
    maximum(x, y, where, *rows.bounds, *columns.bounds, *sizes, False)
    gradient(y, where, dx, *sizes, True)
    for array, end in ((y, count), (where, count), (dx, x.size)):
        assert (array[end:] == 99).all()
    assert not (dx[:x.size] == 99).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(8, 8), (7, 7), (1, 3), (40, 33)], ids=str)
def test_the_sum_of_an_image_equals_that_in_float64(size: tuple[int, int], dtype: str) -> None:
    rows, columns = (side(n, n, 1) for n in size)
    x = np.random.default_rng(0).standard_normal((3, 5, *size)).astype(dtype)
    exact = x.astype("float64").sum(axis=(2, 3), keepdims=True)
    np.testing.assert_allclose(window_total(x, rows, columns), exact, rtol=1e-6 if dtype == "float32" else 1e-13, atol=1e-6)
    gradient = window_total_gradient(x[:, :, :1, :1], rows, columns)
    np.testing.assert_array_equal(gradient, np.broadcast_to(x[:, :, :1, :1], x.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [side(8, 2, 2), side(33, 3, 1), side(70, 5, 2), side(40, 7, 5), side(300, 280, 7),
                                     side(600, 2, 2), Side((0, 0, 1, 4, 4), (1, 2, 6, 6, 7), 7), Side((0,) * 700, (3,) * 700, 4)],
                         ids=lambda columns: f"{len(columns.starts)} in {columns.size}")
def test_sums_over_windows_equal_those_in_float64(columns: Side, dtype: str) -> None:
    rows = Side((0, 0, 2), (1, 3, 5), 5)
    x = np.random.default_rng(0).standard_normal((3, 3, 5, columns.size)).astype(dtype)
    found, exact = window_total(x, rows, columns), window_total.reference(x.astype("float64"), rows, columns)
    bound = np.finfo(dtype).eps * np.maximum(np.abs(exact), 1 if dtype == "float64" else 1e-6)
    assert (np.abs(found - exact) <= (bound if dtype == "float32" else 300 * bound)).all()


@pytest.mark.parametrize("width", [5, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_reaches_the_sums_of_its_windows_only(value: float, width: int) -> None:
    rows, columns = side(8, 2, 2), side(8, width, 1)
    x = np.random.default_rng(0).standard_normal((9, 1, 8, 8)).astype("float32")
    x[4, 0, 3, 4] = value
    with np.errstate(invalid="ignore"):
        wanted = window_total.reference(x, rows, columns)
    np.testing.assert_allclose(window_total(x, rows, columns), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [(8, 8), (7, 7), (3, 5)], ids=str)
def test_the_sum_of_an_image_has_the_same_bits_whatever_others_there_are(size: tuple[int, int]) -> None:
    rows, columns = (side(n, n, 1) for n in size)
    x = np.random.default_rng(0).standard_normal((19, 1, *size)).astype("float32")
    together = window_total(x, rows, columns)
    for i in range(19):
        np.testing.assert_array_equal(window_total(x[i:i + 1], rows, columns), together[i:i + 1])
