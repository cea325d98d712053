"""The loops of batch norm where their sums are hard: against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.errors import ArgumentError
from mpitrain.kernels import pointwise
from mpitrain.kernels.batch_norm import ACTIVATIONS, RELU, batch_norm, batch_norm_gradients, channel_moments, channel_sums
from mpitrain.kernels.kernel import kind

RTOL = {"float32": 2e-6, "float64": 1e-14}
SHAPES = [(3, 4, 37), (2, 1, 5001), (5, 70, 16), (2, 3, 90_000), (1, 2, 64), (300, 150, 4)]      # tails, long runs, groups


def data(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def far_first(shape: tuple[int, ...], dtype: str) -> Any:
    """The first sample lies far from all others: a bad centre for the sums."""
    x = data(shape, dtype)
    x[0] += 300
    return x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moments_equal_those_in_float64(shape: tuple[int, ...], dtype: str) -> None:
    for x in (data(shape, dtype), data(shape, dtype) + np.dtype(dtype).type(1000), far_first((9, *shape[1:]), dtype)):
        mean, squares = channel_moments(x)
        exact = x.astype(np.float64)
        np.testing.assert_allclose(mean, exact.mean((0, 2)), rtol=RTOL[dtype], atol=RTOL[dtype])
        np.testing.assert_allclose(squares, exact.var((0, 2)) * (x.size // shape[1]), rtol=10 * RTOL[dtype])


def test_a_far_first_sample_costs_no_digits() -> None:
    """Were its mean the centre of all sums, 400 times the sum of squares would be there to subtract from."""
    x = data((400, 1, 64), "float32")
    x[0] += 3e6
    exact = x.astype(np.float64)
    mean, squares = channel_moments(x)
    np.testing.assert_allclose(squares, ((exact - exact.mean()) ** 2).sum(), rtol=2e-6)
    np.testing.assert_allclose(mean, exact.mean(), rtol=1e-7)


def test_a_channel_of_one_value_has_no_variance() -> None:
    mean, squares = channel_moments(np.full((7, 2, 99), np.float32(1000.1)))
    assert squares.tolist() == [0, 0] and np.allclose(mean, np.float32(1000.1), rtol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("relu", ["none", "from y", "from x"])
def test_gradients_equal_those_in_float64(shape: tuple[int, ...], dtype: str, relu: str) -> None:
    x, grad, y, channel = data(shape, dtype), data(shape, dtype, 1), data(shape, dtype, 2), data(shape[1:2], dtype, 3)
    mean, variance = x.mean((0, 2)), x.var((0, 2), dtype="float64")
    inverse = 1 / np.sqrt(variance + 1e-3)
    dx, before, plain, product = batch_norm_gradients(grad, x, y if relu == "from y" else None, mean, channel, -channel, inverse,
                                                      relu != "none", True)
    distance = (x - mean[:, None]).astype(np.float64)
    again = (x - mean[:, None]) * (inverse * channel).astype(dtype)[:, None] - channel[:, None]
    passed = {"none": True, "from y": y > 0, "from x": again > 0}[relu]
    h = np.where(passed, grad, 0).astype(np.float64)
    sums, products, count = h.sum((0, 2)), (h * distance).sum((0, 2)), x.size // shape[1]
    assert relu == "from x" or np.array_equal(before, h)
    close = {"rtol": RTOL[dtype], "atol": RTOL[dtype] * np.sqrt(count)}
    np.testing.assert_allclose(plain, sums, **close)
    np.testing.assert_allclose(product, products, **close)
    wanted = (inverse * channel)[:, None] * (h - (sums / count)[:, None] - distance * (inverse ** 2 * products / count)[:, None])
    np.testing.assert_allclose(dx, wanted, rtol=10 * RTOL[dtype], atol=10 * RTOL[dtype])
    if relu == "none":
        for found, same in zip(channel_sums(grad, x, mean), (plain, product)):
            np.testing.assert_array_equal(found, same)


def test_what_is_not_a_number_reaches_its_own_channel_only() -> None:
    x = data((3, 4, 37), "float32")
    x[1, 2, 36] = np.nan
    y, mean, _, inverse = batch_norm(x, None, None, None, 1e-5, True)
    assert np.isnan(y[:, 2]).all() and np.isnan([mean[2], inverse[2]]).all()
    assert np.isfinite(np.delete(y, 2, axis=1)).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 4, 37), (70, 130, 4), (2, 3, 300)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activations_are_those_of_the_expressions(shape: tuple[int, ...], dtype: str, activation: int) -> None:
    """Numbers beyond 3 and 6 among them; a number at a bound itself may be on either side after rounding."""
    x, grad = data(shape, dtype), data(shape, dtype, 1)
    weight, bias = 4 * data(shape[1:2], dtype, 2), 3 * data(shape[1:2], dtype, 3)
    found, wanted = (run(x, weight, bias, None, 1e-5, activation) for run in (batch_norm, batch_norm.reference))
    np.testing.assert_allclose(found[0], wanted[0], rtol=20 * RTOL[dtype], atol=20 * RTOL[dtype])
    assert activation == RELU or (found[0] == 6).any() or found[0].max() > 6
    given = x, None, wanted[1].astype(dtype), weight, bias, wanted[3], activation, True
    dx, _, plain, product = batch_norm_gradients(grad, *given)
    exact_dx, _, exact_plain, exact_product = batch_norm_gradients.reference(grad, *given)
    close = {"rtol": 20 * RTOL[dtype], "atol": 20 * RTOL[dtype] * np.sqrt(x.size // shape[1])}
    for one, other in ((dx, exact_dx), (plain, exact_plain), (product, exact_product)):
        np.testing.assert_allclose(one, other, **close)


@pytest.mark.skipif(kind() == "numpy", reason="NumPy's expressions are written in another order")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(3, 4, 37), (70, 130, 4), (2, 3, 2300), (9, 40, 49)], ids=str)
def test_silu_in_the_same_passes_has_the_bits_of_silu_afterwards(shape: tuple[int, ...], dtype: str) -> None:
    x, grad = data(shape, dtype), data(shape, dtype, 1)
    weight, bias, silu = 4 * data(shape[1:2], dtype, 2), 3 * data(shape[1:2], dtype, 3), pointwise.ACTIVATIONS["silu"]
    found = batch_norm(x, weight, bias, None, 1e-5, ACTIVATIONS["silu"])
    plain, mean, *_, inverse = batch_norm(x, weight, bias, None, 1e-5, 0)
    wanted, slope = silu.forward(plain, ours=True, training=True)
    np.testing.assert_array_equal(found[0], wanted)
    given = x, None, mean.astype(dtype), weight, bias, inverse
    found = batch_norm_gradients(grad, *given, ACTIVATIONS["silu"], True)
    without = batch_norm_gradients(grad, *given, ACTIVATIONS["silu"], False)
    wanted = batch_norm_gradients(silu.gradient(slope, grad, None), *given, 0, True)
    assert without[0] is None
    for place in 0, 2, 3:
        np.testing.assert_array_equal(found[place], wanted[place])
        assert place == 0 or np.array_equal(without[place], wanted[place])


@pytest.mark.skipif(kind() == "numpy", reason="C and the loops check the number, which NumPy's expression takes for none")
def test_only_relu_comes_after_a_residual_and_no_other_number_is_an_activation() -> None:
    x, channel = data((2, 3, 5), "float32"), np.ones(3, np.float32)
    for activation in ACTIVATIONS["relu6"], 5, -1:
        with pytest.raises(ArgumentError, match=rf"batch_norm: activation is {activation}, expected 0 to 1 beside a residual"):
            batch_norm(x, channel, channel, x, 1e-5, activation)
    for activation in -2, 5:                                 # C takes what it does not know for ReLU with a residual
        with pytest.raises(ArgumentError, match=rf"gradients: activation is {activation}, expected 0 to 4$"):
            batch_norm_gradients(x, x, None, channel, channel, channel, np.ones(3), activation, True)
    with pytest.raises(ArgumentError, match="gradients: activation is 3, expected 0 to 1 beside a residual"):
        batch_norm_gradients(x, x, x, channel, channel, channel, np.ones(3), ACTIVATIONS["hardswish"], True)


def test_gradients_of_weight_and_bias_go_where_they_are_wanted() -> None:
    rng = np.random.default_rng(2)
    grad, x = rng.standard_normal((2, 5, 3, 7)).astype("float32")
    centre, weight, bias = rng.standard_normal((3, 3)).astype("float32")
    inverse, into = rng.random(3), tuple(np.full((2, 3), np.nan, "float32"))
    _, _, plain, product = batch_norm_gradients(grad, x, None, centre, weight, bias, inverse, 0, True, into)
    np.testing.assert_array_equal(into, [(product * inverse).astype("float32"), plain.astype("float32")])
