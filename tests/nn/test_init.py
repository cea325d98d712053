"""Initialisers: the distributions they promise, against PyTorch's own formulas for bounds and spreads."""

import math

import numpy as np
import pytest

from mpitrain.errors import ShapeError
from mpitrain.nn import init

SHAPE = (40, 30, 3, 5)
FAN_IN, FAN_OUT = 30 * 15, 40 * 15


def draw(initialiser, shape=SHAPE, key=1):
    return initialiser(key, 0, math.prod(shape), shape, np)


@pytest.mark.parametrize(("initialiser", "std"), [
    (init.normal(0.3, mean=2.0), 0.3),
    (init.kaiming_normal(), math.sqrt(2 / FAN_IN)),
    (init.kaiming_normal(fan="out"), math.sqrt(2 / FAN_OUT)),
    (init.kaiming_normal(slope=1.0), math.sqrt(1 / FAN_IN)),
    (init.xavier_normal(gain=2.0), 2 * math.sqrt(2 / (FAN_IN + FAN_OUT)))])
def test_normal_values_have_the_spread_asked_for(initialiser, std):
    values = draw(initialiser)
    assert values.dtype == np.float64
    assert abs(values.std() / std - 1) < 0.03
    assert abs((np.abs(values - values.mean()) < std).mean() - 0.6827) < 0.02


@pytest.mark.parametrize(("initialiser", "bound"), [
    (init.uniform(0.7), 0.7),
    (init.default_weight, 1 / math.sqrt(FAN_IN)),
    (init.fan_in_uniform(SHAPE), 1 / math.sqrt(FAN_IN)),
    (init.kaiming_uniform(), math.sqrt(6 / FAN_IN)),
    (init.xavier_uniform(), math.sqrt(6 / (FAN_IN + FAN_OUT)))])
def test_uniform_values_fill_their_bounds(initialiser, bound):
    values = draw(initialiser)
    assert -bound <= values.min() < -0.99 * bound and 0.99 * bound < values.max() < bound
    assert abs(values.std() / (bound / math.sqrt(3)) - 1) < 0.03


def test_constants():
    assert (draw(init.zeros) == 0).all() and (draw(init.ones) == 1).all() and (draw(init.constant(2.5)) == 2.5).all()


def test_any_slice_is_the_same_as_in_the_whole():
    for initialiser in (init.normal(1.0), init.xavier_uniform(), init.ones):
        np.testing.assert_array_equal(initialiser(3, 100, 50, SHAPE, np), draw(initialiser, key=3)[100:150])


def test_fans_need_two_dims_and_a_known_name():
    with pytest.raises(ShapeError, match=r"at least 2 dims, this one has shape \(3,\)"):
        draw(init.kaiming_normal(), (3,))
    with pytest.raises(ShapeError, match='fan is "in" or "out", not "both"'):
        draw(init.kaiming_normal(fan="both"))


def test_a_weight_without_inputs_is_no_division_by_zero():
    assert init.fan_in_uniform((3, 0))(0, 0, 2, (2,), np).tolist() == [0.0, 0.0] and draw(init.default_weight, (3, 0)).size == 0
