"""NaN and infinity go through the compiled kernels as through the expressions that define them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.kernels import convolution, rows
from mpitrain.kernels.convolution import Window
from mpitrain.kernels.convolution_bfloat16 import kernel_gradient_bfloat16
from mpitrain.kernels.pointwise import ACTIVATIONS
from tests.kernels.test_kernels import arrays_of

STRANGE = [np.nan, np.inf, -np.inf]


def same_where_not_finite(kernel: Any, *arguments: Any, atol: float = 1e-5) -> None:
    """NaN where the reference has it, infinities of the same sign, numbers that are equal up to rounding."""
    if kernel.host() is None:
        pytest.skip("no compiler")
    with np.errstate(all="ignore"):
        found, wanted = (arrays_of(version(*(a.copy() if isinstance(a, np.ndarray) else a for a in arguments)))
                         for version in (kernel.host(), kernel.reference))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "sigmoid", "relu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_activation_hands_on_what_is_not_finite(name: str, dtype: str) -> None:
    x = np.linspace(-3, 3, 40).astype(dtype)
    x[:3] = x[20:23] = STRANGE
    activation = ACTIVATIONS[name]
    same_where_not_finite(activation.values, x)
    if activation.and_slope is not None:
        same_where_not_finite(activation.and_slope, x, np.empty_like(x))


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("kernel", [rows.softmax, rows.log_softmax], ids=lambda kernel: kernel.name)
def test_a_row_hands_on_what_is_not_finite(kernel: Any, strange: float) -> None:
    x = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32)
    x[1, 5] = x[2, 69] = strange
    same_where_not_finite(kernel, x)


@pytest.mark.parametrize("place", [(0, 0), (4, 5), (7, 2)], ids=str)
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_infinite_pixel_reaches_its_own_results_with_its_sign_and_no_other(dtype: str, padding: int, place: Any) -> None:
    """Winograd's tiles, which a 3 x 3 kernel of stride 1 and these channels are computed by, add infinity to minus infinity."""
    rng, window = np.random.default_rng(0), Window((3, 3), padding=(padding, padding))
    x, weight = (rng.standard_normal(shape).astype(dtype) for shape in ((3, 32, 8, 9), (40, 32, 3, 3)))
    y = rng.standard_normal((3, 40, *window.outputs(8, 9))).astype(dtype)
    corner = tuple(np.minimum(place, np.array(y.shape[2:]) - 1))
    calm = convolution.convolve(x, weight, None, window, 1), convolution.convolve_adjoint(y, weight, None, window, 1, (8, 9))
    for strange in STRANGE:
        x[1, 3, place[0], place[1]], y[1, 3, corner[0], corner[1]] = strange, strange
        for kernel, *arguments in ((convolution.convolve, x, weight, None, window, 1),
                                   (convolution.convolve_adjoint, y, weight, None, window, 1, (8, 9))):
            same_where_not_finite(kernel, *arguments, atol=1e-4)                   # of sums of 288 products
        found = convolution.convolve(x, weight, None, window, 1), convolution.convolve_adjoint(y, weight, None, window, 1, (8, 9))
        for before, after in zip(calm, found):                                     # other images keep their bits
            assert before[::2].tobytes() == after[::2].tobytes() and np.isinf(after[1]).any() != np.isnan(strange)
        slopes = np.where(np.isfinite(y), y, 1).astype(dtype)
        same_where_not_finite(convolution.kernel_gradient, x, slopes, window, 1, atol=1e-4)
    x[1] = 0                                                                       # and so does an infinite weight
    weight[3, 2, 1, 1] = np.inf
    assert np.isnan(convolution.convolve(x, weight, None, window, 1)[1, 3]).all()
    assert np.isfinite(convolution.convolve(x, weight, None, window, 1)[1, 4:]).all()


def test_large_pixels_whose_results_are_small_do_not_overflow_on_the_way() -> None:
    window, results = Window((3, 3), padding=(1, 1)), []
    x, weight = np.full((2, 32, 8, 8), 1e38, np.float32), np.full((32, 32, 3, 3), 1e-8, np.float32)
    x[1] = 1
    for kernel, *arguments in ((convolution.convolve, x, weight, None, window, 1),
                               (convolution.convolve_adjoint, x, weight, None, window, 1, (8, 8)),
                               (convolution.kernel_gradient, x, np.full_like(x, 1e-8), window, 1)):
        with np.errstate(all="ignore"):
            found, wanted = (arrays_of(version(*arguments))[0] for version in (kernel, kernel.reference))
        assert np.isfinite(wanted).all() and np.allclose(found, wanted, rtol=1e-4)
        results.append(found)
    for found in results[:2]:                                                      # the other image is done alone
        assert np.allclose(found[1, :, 1:-1, 1:-1], 288e-8)


@pytest.mark.parametrize(("shape", "outputs", "side", "groups"), [
    ((3, 3, 7, 5), 4, 3, 1), ((4, 9, 5, 5), 6, 5, 3), ((2, 16, 10, 10), 16, 3, 1), ((1, 4, 12, 13), 3, 5, 1)], ids=str)
@pytest.mark.parametrize("kernel", [convolution.kernel_gradient, kernel_gradient_bfloat16], ids=lambda k: k.name)
def test_the_padding_that_an_infinite_pixel_meets_makes_no_nan(kernel: Any, shape: Any, outputs: int, side: int,
                                                               groups: int) -> None:
    rng, window = np.random.default_rng(0), Window((side, side), padding=(side // 2, side // 2))
    x = rng.standard_normal(shape).astype(np.float32)
    y = rng.standard_normal((shape[0], outputs, *window.outputs(*shape[2:]))).astype(np.float32)
    for strange in STRANGE:
        x[0, 0, 0, 0] = strange
        same_where_not_finite(kernel, x, y, window, groups, atol=2e-4)


@pytest.mark.parametrize("channels", [(3, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("kernel", [convolution.kernel_gradient, kernel_gradient_bfloat16], ids=lambda k: k.name)
def test_the_gradient_of_few_outputs_is_not_finite_at_the_taps_that_reach_the_pixel_alone(kernel: Any, channels: Any) -> None:
    rng, window = np.random.default_rng(0), Window((3, 3), padding=(0, 0))
    x = rng.standard_normal((3, channels[0], 8, 9)).astype(np.float32)
    y = rng.standard_normal((3, channels[1], 6, 7)).astype(np.float32)
    for strange in STRANGE:
        x[1, 2, 0, 0] = strange
        same_where_not_finite(kernel, x, y, window, 1, atol=1e-4)
