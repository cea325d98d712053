"""C and Numba against each other where they promise the same bits, on more numbers and shapes than the examples have."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from mpitrain.backend import native
from mpitrain.kernels import KERNELS, batch_norm, elementwise, lines, pool, special
from mpitrain.kernels.convolution import Window
from mpitrain.kernels.kernel import has_numba

pytestmark = pytest.mark.skipif(native.load("lines") is None or not has_numba(), reason="needs both C and Numba")
assert batch_norm and elementwise and lines and pool and special
TYPES = ("float32", "float64")


def edges(dtype: str) -> np.ndarray:
    rng, kind = np.random.default_rng(3), np.finfo(dtype)
    some = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, -0.5, -3, -2.5, 8, 12, 171, -171.3, 30, 26.6, -26.6, 700, 1e30,
            kind.max, -kind.max, kind.tiny, kind.smallest_subnormal, -kind.smallest_subnormal, kind.eps, 1 - kind.eps, 0.999]
    return np.concatenate([np.array(some), rng.uniform(-1, 1, 700), rng.normal(0, 9, 700), 10.0 ** rng.uniform(-30, 30, 99)]
                          ).astype(dtype)


def same(name: str, *arguments: Any) -> None:
    """The same bits of results and of what is written in place; NaN has no bits of its own."""
    ours, theirs = copy.deepcopy(arguments), copy.deepcopy(arguments)
    in_c, in_numba = KERNELS[name].host(), KERNELS[name].numba()
    assert in_c is not None and in_numba is not None
    a, b = in_c(*ours), in_numba(*theirs)
    for found, wanted in ((b, a), *zip(theirs, ours)):
        if isinstance(wanted, np.ndarray):
            assert found.shape == wanted.shape and found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)
            if wanted.dtype.kind == "f":
                number = wanted == wanted
                assert np.array_equal(np.signbit(found)[number], np.signbit(wanted)[number])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["erf", "erfc", "erfcx", "erfinv"])
def test_error_functions(name: str, dtype: str) -> None:
    for x in (edges(dtype), edges(dtype)[::-3], np.empty((0, 3), dtype), np.asarray(0.3, dtype)):
        same(name, x)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["lgamma", "digamma", "trigamma"])
def test_gamma_functions(name: str, dtype: str) -> None:
    """Below 1/2 they have logarithms and sines of the C library, of which Numba may know another: the last places are free."""
    x = edges(dtype)
    in_c, in_numba = KERNELS[name].host(), KERNELS[name].numba()
    assert in_c is not None and in_numba is not None
    same(name, x[(x >= 0.5) & (x < 1e30)])
    np.testing.assert_allclose(in_numba(x), in_c(x), rtol=1e-6 if dtype == "float32" else 1e-14, atol=1e-13)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["remainder", "fmod", "logaddexp"])
def test_functions_of_two(name: str, dtype: str) -> None:
    x = edges(dtype)
    for shift in range(0, 40, 3):
        same(name, x, np.roll(x, shift))
    y, times = np.random.default_rng(0).uniform(1, 2, (2, 600)).astype(dtype)
    for away in (0, 1e9):                         # quotients that are rounded to the next whole number
        same(name, np.nextafter(np.rint(times * 1000) * y, np.asarray(away, dtype)), y)
    same(name, np.rint(x[100:700] * 50), np.full(600, 3, dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_in_place_of_nan_and_infinities(dtype: str) -> None:
    same("replace", edges(dtype), 0.1, 3.3, -np.inf)


def tied(dtype: str, *shape: int) -> np.ndarray:
    """Numbers with equal ones among them, and NaN, infinities and both zeros."""
    rng = np.random.default_rng(5)
    x: np.ndarray = np.rint(rng.normal(0, 4, shape)).astype(dtype)
    x[rng.random(shape) < 0.1] = -0.0
    x[rng.random(shape) < 0.02] = np.nan
    x[rng.random(shape) < 0.02] = -np.inf
    return x


@pytest.mark.parametrize("dtype", TYPES)
def test_scans(dtype: str) -> None:
    for shape in ((5, 9, 3), (2, 7, 70), (6, 40, 1), (1, 33, 1), (3, 0, 2), (3, 1, 64)):
        x = np.random.default_rng(0).uniform(0.5, 1.6, shape).astype(dtype)
        x.reshape(-1)[:2] = -0.0
        for back in (False, True):
            same("cumsum", x, 1, back)
            same("cumprod", x, 1, back)
        for smallest in (False, True):
            same("cumextremum", tied(dtype, *shape), 1, smallest)


@pytest.mark.parametrize("dtype", TYPES)
def test_products_and_their_gradients(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for shape in ((11, 37), (8, 16), (1, 1), (3, 5, 15), (2, 0)):
        x, g = rng.uniform(-1.5, 1.5, (2, *shape)).astype(dtype)
        same("prod", x)
        if shape[-1]:
            same("cumprod_gradient", x, g)
            same("prod_gradient", x, g[..., 0].copy())


@pytest.mark.parametrize("dtype", TYPES)
def test_ranks(dtype: str) -> None:
    x = tied(dtype, 3, 2, 331)
    for k in (0, 1, 2, 7, 80):
        for largest in (False, True):
            same("extreme", x, k, largest)
            shuffled = np.random.default_rng(k).permuted(np.arange(20000, dtype=dtype).reshape(40, 500), axis=1)
            same("extreme", shuffled, k, largest)
    for rank in (0, 1, 165, 329, 330):
        same("place_of_rank", x, np.full((3, 2, 1), rank))
        same("place_of_rank", -np.sort(x), np.full((3, 2, 1), rank))


@pytest.mark.parametrize("dtype", TYPES)
def test_values_at_places(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for dim, shape, count in ((0, (5, 7), 9), (1, (4, 6, 5), 3), (2, (2, 3, 8), 11)):
        x = rng.standard_normal(shape).astype(dtype)
        index = rng.integers(0, shape[dim], tuple(count if d == dim else n for d, n in enumerate(shape)))
        source = rng.standard_normal(index.shape).astype(dtype)
        same("gather", x, index, dim)
        for add in (False, True):
            same("scatter", x, index, source, dim, add)


@pytest.mark.parametrize("dtype", TYPES)
def test_triangles(dtype: str) -> None:
    for shape in ((3, 5, 7), (7, 5), (1, 0, 4)):
        x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
        for diagonal in (-9, -5, -1, 0, 2, 6, 40):
            for upper in (False, True):
                same("triangle", x, diagonal, upper)


@pytest.mark.parametrize("word", ["c", "numba"])
@pytest.mark.parametrize("name", ["gather", "scatter", "place_of_rank", "smallest"])
def test_an_index_outside_is_an_error(name: str, word: str) -> None:
    kernel = KERNELS["extreme" if name == "smallest" else name]
    version: Any = kernel.host() if word == "c" else kernel.numba()
    function = version.args[0]                    # behind the body, which looks at shapes
    x, six = np.zeros(12), np.zeros(6)
    for wrong in (-1, 4, 1 << 40):
        index = np.array([0, 1, wrong])
        with pytest.raises(IndexError):
            if name == "gather":
                function(x, index, six, 3, 4, 1, 1)
            elif name == "scatter":
                function(x, index, six, 3, 4, 1, 1, 1)
            elif name == "place_of_rank":
                function(x, index, np.empty(3, np.int64), 3, 4)
            else:
                function(x, np.empty(15, np.int64), 3, 4, 5, 0)
    if name == "gather":
        with pytest.raises(IndexError):
            function(np.empty(0), np.zeros(3, np.int64), six, 1, 0, 3, 1)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 2, 37), (5, 70, 16), (9, 40, 49), (300, 150, 4), (2, 3, 2100), (4, 2, 256)], ids=str)
def test_batch_norm(shape: tuple[int, ...], dtype: str) -> None:
    """Tails of vectors, more channels than are done at a time, longer runs than their sums take, and a bad first guess."""
    rng = np.random.default_rng(5)
    x, grad, residual = (rng.normal(size=shape).astype(dtype) for _ in range(3))
    weight, bias = (rng.normal(size=shape[1]).astype(dtype) for _ in range(2))
    x[0] += 300
    for choice in (weight, bias, residual, 1e-5, True), (None, None, None, 1e-5, False), (weight, bias, None, 1e-5, True):
        y, mean, _, inverse = alike("batch_norm", x, *choice)
    centre = mean.astype(dtype)
    for name in "channel_moments", "channel_sums", "channel_affine", "channel_combine":
        alike(name, *{"channel_moments": (x,), "channel_sums": (grad, x, centre), "channel_affine": (x, centre, weight, bias),
                      "channel_combine": (grad, x, centre, weight, bias, weight)}[name])
    for before, relu in (None, False), (y, True):
        alike("batch_norm_gradients", grad, x, before, centre, weight, bias, inverse, relu, True)
    in_c, in_numba = KERNELS["batch_norm_gradients"].host(), KERNELS["batch_norm_gradients"].numba()
    assert in_c is not None and in_numba is not None
    for activation in batch_norm.ACTIVATIONS.values():
        alike("batch_norm", x, 3 * weight, bias, None, 1e-5, activation)
        given = grad, x, None, centre, 3 * weight, bias, inverse, activation, True
        found, wanted = in_numba(*given), in_c(*given)
        for place in 0, 2, 3:                                # what is gone before it is undefined without y
            np.testing.assert_array_equal(found[place], wanted[place])


def alike(name: str, *arguments: Any) -> Any:
    """`same` of a kernel with several results; C's."""
    in_c, in_numba = KERNELS[name].host(), KERNELS[name].numba()
    assert in_c is not None and in_numba is not None
    wanted, found = in_c(*arguments), in_numba(*arguments)
    for a, b in zip(wanted, found) if isinstance(wanted, tuple) else [(wanted, found)]:
        np.testing.assert_array_equal(b, a)
    return wanted


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 34])
def test_every_second_pixel(width: int, dtype: str) -> None:
    """Of rows that are no whole vectors, to their last pixel and no further."""
    x = np.random.default_rng(6).normal(size=(2, 3, 5, width)).astype(dtype)
    same("subsample", x, 2, 1, 2)
    same("subsample", x, 3, 0, 1)
    weight, window, in_numba = np.ones((2, 3, 1, 1), dtype), Window((1, 1), (2, 2)), KERNELS["convolve"].numba()
    assert in_numba is not None
    np.testing.assert_allclose(in_numba(x, weight, None, window, 1), x[:, :, ::2, ::2].sum(1, keepdims=True).repeat(2, 1),
                               rtol=1e-5, atol=1e-5)
