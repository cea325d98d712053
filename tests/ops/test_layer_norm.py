"""Layer and RMS norm, alone and of a residual sum: against PyTorch and float64, bits of a row, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import random
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.kernels import layer_norm as kernels
from tests.ops.parity import check, check_gradient

SHAPES = [(4, 3), (7,), (2, 3, 50), (0, 5), (3, 17), (19, 64), (21, 200)]


@pytest.fixture(params=["native", "plain arrays"])
def version(request, monkeypatch):
    if request.param == "plain arrays":
        for name in ("row_norm", "row_norm_gradients"):
            monkeypatch.setattr(getattr(kernels, name), "host", lambda: None)


def functions():
    return pytest.importorskip("torch").nn.functional


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_and_rms_norm_equal_pytorch(shape, version):
    f, last = functions(), shape[-1:]
    eps = 1e-3
    check(lambda x, w, b: ops.layer_norm(x, w, b, eps=eps), lambda x, w, b: f.layer_norm(x, last, w, b, eps), shape, last, last)
    check(lambda x, w: ops.layer_norm(x, w), lambda x, w: f.layer_norm(x, last, w), shape, last)
    check(lambda x, w: ops.rms_norm(x, w, eps=eps), lambda x, w: f.rms_norm(x, last, w, eps), shape, last)


@pytest.mark.parametrize("shape", [(5, 2, 3, 4), (5, 3, 4), (3, 4)], ids=str)
def test_layer_norm_takes_several_last_dims(shape, version):
    f = functions()
    check(lambda x, w, b: ops.layer_norm(x, w, b), lambda x, w, b: f.layer_norm(x, (3, 4), w, b), shape, (3, 4), (3, 4))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_residual_sum_and_its_norm_equal_pytorch(shape, version):
    f, last = functions(), shape[-1:]

    def both(total, y):
        return total * 2 + y * y                             # both results have gradients of their own

    check(lambda x, r, w, b: both(*ops.add_layer_norm(x, r, w, b)),
          lambda x, r, w, b: both(x + r, f.layer_norm(x + r, last, w, b)), shape, shape, last, last)
    check(lambda x, r, w: ops.add_layer_norm(x, r, w)[1], lambda x, r, w: f.layer_norm(x + r, last, w), shape, shape, last)


def test_norms_of_rows_pass_the_gradient_check():
    check_gradient(lambda x, w, b: ops.layer_norm(x, w, b), (3, 7), (7,), (7,))
    check_gradient(lambda x, w: ops.rms_norm(x, w), (3, 7), (7,))
    check_gradient(lambda x, r, w, b: ops.add_layer_norm(x, r, w, b)[1] * 3 + ops.add_layer_norm(x, r, w, b)[0],
                   (3, 7), (3, 7), (7,), (7,))


def trained(x, w, b, upstream, residual=None):
    """(result, gradients of x, w and b)."""
    tensors = [Tensor(a, requires_grad=True) for a in (x, w, b)]
    y = ops.layer_norm(*tensors) if residual is None else ops.add_layer_norm(tensors[0], residual, *tensors[1:])[1]
    y.backward(upstream)
    return y.array, *(t.grad for t in tensors)


def arrays(rows, width, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((rows, width), (width,), (width,), (rows, width))]


@pytest.mark.parametrize("width", [5, 64, 77, 384])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_batch(width, version):
    x, w, b, upstream = arrays(23, width)
    whole = trained(x, w, b, upstream)
    for rows in (slice(0, 1), slice(3, 4), slice(1, 7), slice(5, 23)):
        part = trained(x[rows].copy(), w, b, upstream[rows].copy())
        for a, c in zip(whole[:2], part[:2]):
            np.testing.assert_array_equal(a[rows], c)


@pytest.mark.parametrize("centre", [0, 300])
def test_float32_is_close_to_float64_also_far_from_zero_and_over_many_rows(centre, version):
    x, w, b, upstream = arrays(3000, 130)
    x += np.float32(centre)
    found = trained(x, w, b, upstream)
    wanted = trained(*(a.astype(np.float64) for a in (x, w, b, upstream)))
    for a, c in zip(found, wanted):
        assert np.abs(a - c).max() <= 2e-6 * max(1, centre / 3) * np.abs(c).max()


def test_the_sum_and_its_norm_have_the_bits_of_an_addition_and_a_norm(version):
    x, w, b, upstream = arrays(9, 70)
    residual = arrays(9, 70, seed=1)[0]
    total, y = ops.add_layer_norm(x, residual, w, b)
    np.testing.assert_array_equal(total.array, residual + x)
    np.testing.assert_array_equal(y.array, ops.layer_norm(residual + x, w, b).array)


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_row_and_no_other(strange):
    x, w, b, upstream = arrays(6, 40)
    x[2, 7] = strange
    with np.errstate(invalid="ignore"):
        y, dx, dw, _ = trained(x, w, b, upstream)
    assert np.isnan(y[2]).all() and np.isnan(dx[2]).all() and np.isnan(dw).all()
    others = np.arange(6) != 2
    assert np.isfinite(y[others]).all() and np.isfinite(dx[others]).all()


def test_shapes_that_do_not_fit_are_refused():
    x = np.ones((2, 4, 3))
    with pytest.raises(ShapeError, match=r"layer_norm: the weight has shape \(4,\), the input \(2, 4, 3\) must end with it"):
        ops.layer_norm(x, np.ones(4))
    with pytest.raises(ShapeError, match=r"layer_norm: the bias has shape \(1,\), the weight \(3,\)"):
        ops.layer_norm(x, np.ones(3), np.ones(1))
    with pytest.raises(ShapeError, match=r"add_layer_norm: the residual has shape \(4, 3\), the input \(2, 4, 3\): not equal"):
        ops.add_layer_norm(x, np.ones((4, 3)), np.ones(3))
    with pytest.raises(ConfigError, match="add_layer_norm: dropout is 1, expected at least 0 and less than 1"):
        ops.add_layer_norm(x, x, np.ones(3), dropout=1)


@pytest.mark.parametrize("shape", [(3, 5, 16), (2, 1, 600), (2, 3, 5), (4, 8), (8,)], ids=str)
def test_what_is_dropped_before_the_sum_is_what_dropout_drops(shape, version):
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s).astype(np.float32) for s in (shape, shape, shape[-1:], shape[-1:])]
    upstream = [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]

    def apart(x, r, w, b):
        total = ops.dropout(x, 0.4, "here", r)
        return total, ops.layer_norm(total, w, b)

    found = []
    for run in (lambda *xs: ops.add_layer_norm(*xs, dropout=0.4, layer="here"), apart):
        tensors = [Tensor(v, requires_grad=True) for v in values]
        with random.use(random.Scope(seed=7, step=2)):
            total, y = run(*tensors)
        run_backward((total * upstream[0] + y * upstream[1]).sum())
        found.append([total.array, y.array, *(t.grad for t in tensors)])
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for a, b in zip(*found):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("value", [1000.7, 1e6, -3e-3])
@pytest.mark.parametrize("width", [1, 7, 64, 513])
def test_a_row_of_equal_numbers_is_zero_and_has_no_gradient(value: float, width: int) -> None:
    x, w = Tensor(np.full((3, width), value, np.float32), requires_grad=True), np.ones(width, np.float32)
    y = ops.layer_norm(x, w)
    np.testing.assert_allclose(y.array, 0, atol=1e-3)
    run_backward(y, np.ones_like(x.array))
    np.testing.assert_allclose(x.grad, 0, atol=0.1)            # beside 1 / sqrt(eps) = 316


@pytest.mark.parametrize(("dtype", "large"), [("float32", 3e30), ("float64", 1e200)])
def test_a_row_too_large_for_its_squares_is_nan(dtype: str, large: float) -> None:
    x = np.arange(24.0).reshape(3, 8).astype(dtype)
    x[1, 2] = large
    ones = np.ones(8, dtype)
    with np.errstate(all="ignore"):
        found = ops.layer_norm(x, ones, 0 * ones).array
    assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()
