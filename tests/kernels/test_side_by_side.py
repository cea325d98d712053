"""1 x 1 convolutions of small images, several of them side by side: the bits are those of each pixel wherever it lies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.kernels.convolution import Window, convolve, convolve_adjoint
from mpitrain.kernels.kernel import kind

ONE = Window((1, 1))
CASES = [(64, 112, 1280, 2, 2), (37, 5, 3, 2, 2), (21, 6, 9, 3, 2), (7, 33, 8, 4, 4), (5, 16, 17, 7, 7), (2, 9, 1, 8, 8),
         (130, 1, 1, 1, 1), (16, 3, 40, 1, 5), (3, 4, 4, 5, 5)]
"""Images, channels, outputs, height, width: whole vectors and others, more images than a row has and fewer."""


def made(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def in_a_row(x: Any) -> Any:
    """The same pixels as one image that is too large to lie beside others: (1, C, 80 rows or more, pixels)."""
    flat = x.transpose(1, 0, 2, 3).reshape(1, x.shape[1], len(x), -1)
    return np.concatenate([flat, np.zeros((1, x.shape[1], 80, flat.shape[3]), x.dtype)], axis=2)


def apart(y: Any, shape: tuple[int, ...]) -> Any:
    n, _, h, w = shape
    return y[0, :, :n].reshape(-1, n, h, w).transpose(1, 0, 2, 3)


def same_bits(found: Any, wanted: Any) -> None:
    if kind() != "numpy":                         # NumPy's products are BLAS's, which sums images of other sizes in other orders
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_images_beside_each_other_have_the_bits_of_pixels_in_one_large_image(case: tuple[int, ...], dtype: str) -> None:
    n, c, o, h, w = case
    weight, bias = made((o, c, 1, 1), dtype, 1), made((o,), dtype, 2)
    x, back = made((n, c, h, w), dtype, 3), made((n, o, h, w), dtype, 4)
    for given in (bias, None):
        found = convolve(x, weight, given, ONE, 1)
        same_bits(found, apart(convolve(in_a_row(x), weight, given, ONE, 1), x.shape))
        expected = np.einsum("nchw,oc->nohw", x.astype("f8"), weight[:, :, 0, 0].astype("f8"))
        expected += 0 if given is None else given[:, None, None]
        np.testing.assert_allclose(found, expected, rtol=0, atol=(2e-5 if dtype == "float32" else 1e-13) * c ** 0.5)
    large = in_a_row(back)
    found = convolve_adjoint(back, weight, None, ONE, 1, (h, w))
    same_bits(found, apart(convolve_adjoint(large, weight, None, ONE, 1, large.shape[2:]), back.shape))
    expected = np.einsum("nohw,oc->nchw", back.astype("f8"), weight[:, :, 0, 0].astype("f8"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=(2e-5 if dtype == "float32" else 1e-13) * o ** 0.5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_image_has_the_same_bits_alone_and_among_any_number_of_others(dtype: str) -> None:
    x, weight = made((70, 10, 2, 3), dtype, 0), made((12, 10, 1, 1), dtype, 1)
    whole = convolve(x, weight, None, ONE, 1)
    for part in (slice(0, 1), slice(3, 10), slice(20, 37), slice(6, 70)):
        np.testing.assert_array_equal(convolve(x[part], weight, None, ONE, 1), whole[part])


def test_what_is_not_a_number_stays_in_its_own_pixel() -> None:
    x, weight = made((40, 6, 2, 2), "float32", 0), made((9, 6, 1, 1), "float32", 1)
    clean = convolve(x, weight, None, ONE, 1)
    x[17, 3, 1, 0], x[39, 0, 0, 1] = np.nan, np.inf
    found = convolve(x, weight, None, ONE, 1)
    assert np.isnan(found[17, :, 1, 0]).all() and np.isinf(found[39, :, 0, 1]).all()
    found[17, :, 1, 0], found[39, :, 0, 1] = clean[17, :, 1, 0], clean[39, :, 0, 1]
    np.testing.assert_array_equal(found, clean)
