"""Products by sparse matrices: float64's, one set of bits in any batch, and whatever points outside is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.backend import native
from mpitrain.kernels import sparse
from mpitrain.kernels.few_rows import row_by_row
from mpitrain.kernels.kernel import has_numba
from mpitrain.kernels.product import native as dense_product
from mpitrain.kernels.sparse import block_product, csr_product, dense_of, to_blocks, to_csr

FORMS = {"blocks": (block_product, to_blocks), "csr": (csr_product, to_csr)}
NEEDS_C = pytest.mark.skipif(native.load("sparse") is None or not has_numba(), reason="needs both C and Numba")


def problem(form: str, dtype: str, m: int, n: int, k: int, zeros: float) -> tuple[Any, ...]:
    rng = np.random.default_rng(m + n + k)
    live = rng.random((n, k) if form == "csr" else (n // 16, k)) >= zeros
    w = (rng.normal(size=(n, k)) * (live if form == "csr" else np.repeat(live, 16, axis=0))).astype(dtype)
    return rng.normal(size=(m, k)).astype(dtype), w, rng.normal(size=n).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", list(FORMS))
@NEEDS_C
def test_c_and_numba_have_one_set_of_bits_near_float64s_at_odd_sizes(form: str, dtype: str) -> None:
    kernel, make = FORMS[form]
    for m, n, k in ((0, 16, 3), (1, 48, 31), (7, 32, 65), (64, 160, 127), (70, 48, 200)):
        for zeros in (0.0, 0.9, 1.0):
            x, w, bias = problem(form, dtype, m, n, k, zeros)
            found = kernel(x, *make(w), bias)
            assert np.array_equal(found, kernel.numba()(x, *make(w), bias))
            wanted = x.astype(np.float64) @ w.astype(np.float64).T + bias
            assert np.abs(found - wanted).max(initial=0) < (1e-4 if dtype == "float32" else 1e-12)
            for rows in (slice(0, 1), slice(2, 7), slice(m - 3, m)) if m > 3 else ():
                assert np.array_equal(kernel(np.ascontiguousarray(x[rows]), *make(w), bias), found[rows])
            assert np.array_equal(kernel(x, *make(w), None) + bias, found)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@NEEDS_C
def test_products_and_gradients_have_the_bits_of_the_dense_ones(dtype: str) -> None:
    """At sizes whose sums are cut into pieces, within a block of rows too."""
    for m, n, k in ((1, 32, 900), (13, 400, 900), (401, 416, 40), (70, 784, 391)):
        x, w, bias = problem("blocks", dtype, m, n, k, 0.7)
        grad = np.random.default_rng(1).normal(size=(m, n)).astype(dtype)
        s = to_blocks(w)
        assert np.array_equal(block_product(x, *s, bias), row_by_row(x, w, bias))
        scattered = problem("csr", dtype, m, n, k, 0.7)[1]
        assert np.array_equal(csr_product(x, *to_csr(scattered), bias), row_by_row(x, scattered, bias))
        by_x, by_w = dense_product(grad, w, None, None), dense_product(np.ascontiguousarray(grad.T), x, None, None)
        assert np.array_equal(sparse.block_values(w, s.starts, s.columns), s.values)
        assert np.array_equal(sparse.block_input_gradient(grad, *s, k), by_x)
        found = sparse.block_weight_gradient(grad, x, s.starts, s.columns, np.full((n, k), 7, dtype))
        assert np.array_equal(found, np.where(np.repeat(sparse.live_blocks(w), 16, axis=0), by_w, 0))
        if m * n * k < 2e6:
            loop = sparse.block_weight_gradient.numba()
            assert np.array_equal(sparse.block_input_gradient.numba()(grad, *s, k), by_x)
            assert np.array_equal(loop(grad, x, s.starts, s.columns, np.empty((n, k), dtype)), found)


def test_blocks_that_do_not_ascend_are_read_from_no_matrix() -> None:
    x, w, _ = problem("blocks", "float32", 3, 32, 9, 0.0)
    s = to_blocks(w)
    for kernel, given in ((sparse.block_values, (w, s.starts, s.columns[::-1].copy())),
                          (sparse.block_weight_gradient, (np.ones((3, 32), np.float32), x, s.starts, s.columns[::-1].copy(),
                                                          np.empty_like(w)))):
        if kernel.host() is not None:
            with pytest.raises(IndexError):
                kernel(*given)


def test_the_forms_hold_what_the_matrix_has() -> None:
    for form, (_, make) in FORMS.items():
        _, w, _ = problem(form, "float32", 1, 64, 37, 0.8)
        assert np.array_equal(dense_of(*make(w), 37), w)
    csr = FORMS["csr"][1](np.array([[0, 1.5, 0], [0, 0, 0], [2, 0, 3]], np.float32))
    assert csr.starts.tolist() == [0, 1, 1, 3] and csr.columns.tolist() == [1, 0, 2] and csr.values.tolist() == [1.5, 2, 3]


@pytest.mark.parametrize("form", list(FORMS))
def test_what_points_outside_is_refused(form: str) -> None:
    kernel, make = FORMS[form]
    if kernel.host() is None:
        pytest.skip("no compiled version")
    x, w, bias = problem(form, "float32", 3, 32, 9, 0.5)
    s = make(w)
    for starts, columns in ((s.starts, s.columns + 9), (s.starts, s.columns - 9), (s.starts[::-1].copy(), s.columns),
                            (s.starts + 1, s.columns), (np.where(np.arange(len(s.starts)) == 1, 1 << 40, s.starts), s.columns)):
        with pytest.raises(IndexError):
            kernel(x, starts, columns, s.values, bias)
    with pytest.raises(ValueError, match="product"):
        kernel(x, s.starts, s.columns, s.values[:-1], bias)
    with pytest.raises((TypeError, ValueError)):
        kernel(x.astype(np.float64), s.starts, s.columns, s.values, bias)
