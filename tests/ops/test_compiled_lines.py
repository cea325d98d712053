"""What C computes of scans, ranks, places and special functions, against definitions: ties, NaN, zeros, infinities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain import Tensor, gradcheck, ops
from mpitrain.errors import ShapeError
from mpitrain.kernels import lines, special

mpmath = pytest.importorskip("mpmath", reason="mpmath is not installed: pip install mpmath")
torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

INF, NAN = np.inf, np.nan
EDGES = [0.0, -0.0, 1.0, -1.0, 2.5, -3.0, 1e-30, 5e9, INF, -INF, NAN]
FUNCTIONS = {
    "erf": (mpmath.erf, (-6, 6)), "erfc": (mpmath.erfc, (-6, 9)), "erfinv": (mpmath.erfinv, (-1, 1)),
    "erfcx": (lambda x: mpmath.exp(x * x) * mpmath.erfc(x), (-5, 60)), "lgamma": (mpmath.loggamma, (0.01, 60)),
    "digamma": (mpmath.digamma, (-6, 60))}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_functions_have_the_last_digits(name: str) -> None:
    function, (low, high) = FUNCTIONS[name]
    x = np.random.default_rng(0).uniform(low, high, 150)
    for dtype, digits in (("float32", 1.2e-7), ("float64", 2e-14)):
        given = x.astype(dtype)
        with mpmath.workdps(30):
            wanted = np.array([float(function(mpmath.mpf(float(v)))) for v in given])
        found = getattr(ops, name)(given).array
        assert found.dtype == dtype
        assert (abs(found - wanted) <= digits * np.maximum(abs(wanted), 1e-30 if name[:3] == "erf" else 1)).all()


def test_lgamma_next_to_its_zeros_has_all_digits_and_is_0_there() -> None:
    steps = np.concatenate([[0], 10.0 ** np.arange(-15, 0), [0.25, 0.4999]])
    x = np.concatenate([zero + sign * steps for zero in (1, 2) for sign in (-1, 1)])
    with mpmath.workdps(40):
        wanted = np.array([float(mpmath.loggamma(mpmath.mpf(float(v)))) for v in x])
    for lgamma in (special.lgamma, special.lgamma.reference):
        assert (abs(lgamma(x) - wanted) <= 1e-15 * abs(wanted)).all()


@pytest.mark.parametrize("product", [lines.prod, lines.prod.reference], ids=["compiled", "expression"])
def test_a_product_overflows_where_it_is_too_large_and_not_on_the_way(product: Any) -> None:
    for dtype, large in (("float32", 1e10), ("float64", 1e100)):
        x = np.tile(np.array([large, 1 / large], dtype), (9, 32))
        assert product(x).dtype == dtype and np.allclose(product(x), 1)
        with np.errstate(over="ignore"):
            assert np.isinf(product(x[:, ::2])).all()
    x = np.array([[1e30] * 4 + [1e-30] * 4], np.float32)
    assert np.allclose(product(x), 1)
    x = np.random.default_rng(0).standard_normal((11, 70))
    assert product(x).tobytes() == np.cumprod(x, axis=1)[:, -1].tobytes()          # in one order


@pytest.mark.parametrize("name", ["erf", "erfc", "lgamma", "digamma", "erfinv"])
def test_special_functions_of_zeros_infinities_and_nan_are_pytorchs(name: str) -> None:
    for dtype in ("float32", "float64"):
        x = np.array(EDGES, dtype)
        with np.errstate(all="ignore"):
            found = getattr(ops, name)(x).array
        assert np.allclose(found, getattr(torch, name)(torch.tensor(x)).numpy(), rtol=2e-6, equal_nan=True)


@pytest.mark.parametrize(("name", "function"), [("remainder", np.remainder), ("fmod", np.fmod), ("logaddexp", np.logaddexp)])
def test_functions_of_two_numbers_have_numpys_values_at_every_pair_of_edges(name: str, function: np.ufunc) -> None:
    for dtype in ("float32", "float64"):
        x, y = (a.ravel().astype(dtype) for a in np.meshgrid(EDGES, EDGES))
        with np.errstate(all="ignore"):
            found, wanted = getattr(ops, name)(x, y).array, function(x, y)
        assert np.allclose(found, wanted, rtol=0 if name != "logaddexp" else 1e-6, atol=0, equal_nan=True)
        assert (np.signbit(found) == np.signbit(wanted))[found == 0].all()


def test_places_are_those_of_a_stable_sort() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(-3, 4, (5, 301)).astype(np.float32)
    x[0, ::50], x[1, 5], x[2] = NAN, -INF, -0.0
    x[2, ::2] = 0.0
    order = np.argsort(x, axis=1, kind="stable")
    largest = 300 - np.argsort(x[:, ::-1], axis=1, kind="stable")[:, ::-1]
    for dim, turn in ((1, lambda a: a), (0, lambda a: a.T)):
        given = turn(x)                                        # along dim 0: not contiguous
        for k in (1, 7, 60, 290):
            assert np.array_equal(ops.topk(given, k, dim, largest=False)[1].array, turn(order[:, :k]))
            assert np.array_equal(ops.topk(given, k, dim)[1].array, turn(largest[:, :k]))
            assert np.array_equal(ops.kthvalue(given, k, dim)[1].array, turn(order)[k - 1] if dim == 0 else order[:, k - 1])
    assert np.array_equal(ops.median(x, 1)[1].array[1:], order[1:, 150])
    assert ops.topk(x, 0, 1)[1].shape == (5, 0)
    assert ops.topk(np.zeros((0, 4), np.float32), 2)[1].shape == (0, 2)


@pytest.mark.parametrize("shape", [(70,), (1, 9), (9, 70), (3, 9, 70), (5, 9, 2), (2, 0, 3)])
def test_scans_are_numpys(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    x.reshape(-1)[:1] = -0.0
    for dim in range(x.ndim):
        for name in ("cumsum", "cumprod"):
            wanted = getattr(np, name)(x, axis=dim, dtype=np.float64).astype(np.float32)
            assert getattr(ops, name)(x, dim).array.tobytes() == np.ascontiguousarray(wanted).tobytes()
        if x.size:
            for name in ("cummax", "cummin"):
                rounded = np.rint(x)
                wanted, places = getattr(torch, name)(torch.tensor(rounded), dim)
                found = getattr(ops, name)(rounded, dim)
                assert np.array_equal(found[0].array, wanted.numpy()) and np.array_equal(found[1].array, places.numpy())


def test_the_gradients_of_products_and_places_are_derivatives() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((6, 7))
    x[0, 2], x[1, 1], x[1, 4] = 0, 0, 0
    index = rng.integers(0, 7, (6, 7))
    once = np.argsort(rng.random((6, 7)), axis=1)              # no place twice: else each has the gradient, as PyTorch's
    for op in (lambda a: ops.prod(a, 1), lambda a: ops.prod(a, 0), lambda a: ops.cumprod(a, 1), lambda a: ops.cumsum(a, 0),
               lambda a: ops.gather(a, 1, index), lambda a: ops.gather(a, 1, index[:4, :3]),
               lambda a: ops.scatter_add(a * a, 1, index, a), lambda a: ops.scatter(a, 1, once[:, :5], a * a),
               lambda a: ops.tril(a * a, -1), lambda a: ops.triu(a * a, 2)):
        gradcheck(op, x)


def test_several_at_one_place_keep_the_last_one_and_wrong_places_are_refused() -> None:
    x = np.zeros((2, 3), np.float32)
    source = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(ops.scatter(x, 1, np.array([[1, 1, 0], [2, 2, 2]]), source).array, [[2, 1, 0], [0, 0, 5]])
    for index in (np.array([[-1]]), np.array([[3]]), np.array([[3]], np.int32)):
        with pytest.raises(ShapeError, match=r"index -?\d is not in 0 \.\.\. 2"):
            ops.gather(x, 1, index)
        with pytest.raises(ShapeError, match=r"index -?\d is not in 0 \.\.\. 2"):
            ops.scatter_add(Tensor(x), 1, index, source)


def test_numbers_in_place_of_nan_and_infinities_may_be_such_themselves() -> None:
    x = np.array([NAN, INF, -INF, 2], np.float32)
    assert np.array_equal(ops.nan_to_num(x, INF, -INF, 7).array, np.array([INF, -INF, 7, 2], np.float32))
    given = Tensor(x, requires_grad=True)
    ops.nan_to_num(given).sum().backward()
    assert given.grad.tolist() == [0, 0, 0, 1]


def test_triangles_of_any_diagonal() -> None:
    x = np.random.default_rng(4).standard_normal((2, 4, 6)).astype(np.float32)
    for diagonal in (-9, -4, -1, 0, 2, 6, 9):
        assert np.array_equal(ops.tril(x, diagonal).array, np.tril(x, diagonal))
        assert np.array_equal(ops.triu(x.swapaxes(1, 2), diagonal).array, np.triu(x.swapaxes(1, 2), diagonal))


@pytest.mark.parametrize("name", ["quantile", "nanquantile"])
def test_a_quantile_keeps_the_dtype_of_what_wants_a_gradient(name: str) -> None:
    for dtype in (np.float64, np.float32):
        x = Tensor(np.array([[3, 0, 1, 2]], dtype), requires_grad=True)
        y = getattr(ops, name)(x, 0.25, dim=1)
        ops.sum(y).backward()
        assert y.dtype == dtype and y.array == dtype(0.75) and x.grad is not None
        np.testing.assert_array_equal(x.grad, np.array([[0, 0.25, 0.75, 0]], dtype))
