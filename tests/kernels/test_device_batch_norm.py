"""Batch norm on a device, where its arguments are not those of `kernel_examples`: on the stand-in for a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_on_host import compiler
from fakegpu import counted, put, xp

from mpitrain import nn
from mpitrain.autograd import Tensor
from mpitrain.backend import Device
from mpitrain.kernels.batch_norm import ACTIVATIONS, batch_norm, batch_norm_gradients, channel_moments
from mpitrain.nn.across import Across

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize("shape", [(6, 3, 64), (40, 3, 49), (300, 5, 1)])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS.values()))
def test_the_gradient_goes_through_an_activation_whose_input_is_computed_anew(shape: tuple[int, ...], activation: int) -> None:
    rng = np.random.default_rng(3)
    grad, x = rng.standard_normal((2, *shape)).astype("float32")
    weight, bias = rng.standard_normal((2, shape[1])).astype("float32") + 1
    wide = [a.astype("float64") for a in (grad, x, weight, bias)]
    _, mean, _, inverse = batch_norm.reference(wide[1], wide[2], wide[3], None, 1e-5, activation)
    expected = batch_norm_gradients.reference(wide[0], wide[1], None, mean, *wide[2:], inverse, activation, True)
    _, centre, _, back = batch_norm(put(x), put(weight), put(bias), None, 1e-5, activation)
    found = batch_norm_gradients(put(grad), put(x), None, centre, put(weight), put(bias), back, activation, True)
    for i in (0, 2, 3):
        np.testing.assert_allclose(found[i].get(), expected[i], rtol=0, atol=3e-6 * abs(expected[i]).max() + 1e-6)


@pytest.mark.parametrize("shape", [(5, 3, 4096), (97, 3, 7), (2000, 3, 1)])
@pytest.mark.parametrize("far", [0.0, 1.0, 1000.0, -30000.0])
def test_a_mean_far_from_zero_takes_nothing_from_the_deviation(shape: tuple[int, ...], far: float) -> None:
    x = (np.random.default_rng(0).standard_normal(shape) + far).astype("float32")
    x[0, 0, 0] += 50                              # an outlier where the statistics begin
    wide = x.astype("float64")
    y, mean, variance, inverse = batch_norm(put(x), None, None, None, 1e-5, 0)
    expected = batch_norm.reference(wide, None, None, None, 1e-5, 0)
    np.testing.assert_allclose(variance.get(), expected[2], rtol=3e-6)
    np.testing.assert_allclose(inverse.get(), expected[3], rtol=3e-6)
    np.testing.assert_allclose(mean.get(), expected[1], rtol=2e-7, atol=1e-6)
    np.testing.assert_allclose(y.get(), expected[0], rtol=0, atol=3e-6 * abs(expected[0]).max())
    np.testing.assert_allclose(channel_moments(put(x))[1].get(), channel_moments.reference(wide)[1], rtol=3e-6)


def test_what_belongs_to_a_channel_of_16_bit_images_is_float32() -> None:
    rng = np.random.default_rng(0)
    x, grad = (put(rng.standard_normal((4, 3, 25)).astype("float16")) for _ in range(2))
    weight, bias = (put(rng.standard_normal(3).astype("float32")) for _ in range(2))
    y, *statistics = batch_norm(x, weight, bias, x, 1e-5, 1)
    dx, before, *sums = batch_norm_gradients(grad, x, y, statistics[0], weight, bias, statistics[2], 1, True)
    assert {a.dtype.name for a in (y, dx, before)} == {"float16"} and {a.dtype.name for a in (*statistics, *sums)} == {"float32"}


@pytest.mark.parametrize("shape", [(8, 4, 1, 1), (32, 4, 7, 7)])
def test_a_layer_waits_for_nothing_and_launches_two_kernels_each_way(shape: tuple[int, ...]) -> None:
    model = nn.SyncBatchNorm(4, activation="relu")
    model.initialize(device=Device("gpu", xp), dtype="float32")

    class TwoRanks(Across):
        def reduce(self, total: Any) -> None:
            total *= 2.0                          # They have the same.
    x = put(np.random.default_rng(0).standard_normal(shape).astype("float32"))
    alone = model(Tensor(x, requires_grad=True))
    with counted() as counts:
        alone.backward(x)
        alone = model(Tensor(x, requires_grad=True))
    assert not counts.syncs
    for name in ("moments_float32", "normalise_float32", "sums_float32", "gradients_float32"):
        assert counts.launches[name] == 1, name
    model.across = TwoRanks()
    with counted() as counts:
        y = model(Tensor(x, requires_grad=True))
        y.backward(x)
    assert not counts.syncs
    np.testing.assert_allclose(y.array.get(), alone.array.get(), atol=1e-5)
