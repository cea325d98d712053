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


@pytest.mark.parametrize(("call", "message"), [
    (lambda: init.kaiming_normal(mode="fan_out", nonlinearity="relu"),
     "kaiming_normal: .*'mode'; its arguments are .slope, fan.; PyTorch's mode=\"fan_out\" is fan=\"out\""),
    (lambda: init.kaiming_uniform(a=0.2), "kaiming_uniform: .*'a'; .*its a is the slope"),
    (lambda: init.truncated_normal(std=0.5, a=-1, b=1), "truncated_normal: .*; PyTorch's a and b are low and high"),
    (lambda: init.uniform(a=0.0, b=1.0), r"uniform: .*; its arguments are \(bound\)"),
    (lambda: init.constant(), r"constant: missing 1 required positional argument: 'value'; its arguments are \(value\)"),
    (lambda: init.normal(0.0, 0.02), "normal: std is 0.0 and mean 0.02, expected std > 0, which comes first"),
    (lambda: init.eye(), "nn.init.eye is an initialiser, no function that makes one; write nn.init.eye without brackets"),
    (lambda: init.zeros(), "nn.init.zeros is an initialiser"), (lambda: init.ones(dtype="float32"), "nn.init.ones is an init"),
    (lambda: init.orthogonal(1, 2), "orthogonal: takes .*; its arguments are .gain")])
def test_calls_in_pytorchs_way_say_what_ours_is(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


def test_names_with_an_underscore_say_where_first_values_come_from():
    for name, ours in {"trunc_normal_": "truncated_normal", "kaiming_normal_": "kaiming_normal", "eye_": "eye"}.items():
        with pytest.raises(AttributeError, match=rf"give nn\.init\.{ours} to one before"):
            getattr(init, name)


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


@pytest.mark.parametrize("shape", [(7, 20), (20, 7), (8, 3, 2, 2), (5, 5)])
def test_orthogonal_rows_or_columns_have_the_length_asked_for(shape):
    matrix = draw(init.orthogonal(gain=1.5), shape).reshape(shape[0], -1)
    product = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(product, 2.25 * np.eye(len(product)), atol=1e-13)


def test_orthogonal_matrices_have_no_preferred_signs():
    signs = [np.sign(draw(init.orthogonal(), (6, 6), key)[0]) for key in range(60)]
    assert abs(sum(signs)) < 30


def test_truncated_normal_values_follow_the_cut_density():
    from statistics import NormalDist
    values, n = draw(init.truncated_normal(std=0.5, mean=0.2, low=-0.4, high=0.9)), NormalDist(0.2, 0.5)
    assert -0.4 <= values.min() < -0.38 and 0.88 < values.max() <= 0.9
    for at in (-0.2, 0.1, 0.5):
        expected = (n.cdf(at) - n.cdf(-0.4)) / (n.cdf(0.9) - n.cdf(-0.4))
        assert abs((values < at).mean() - expected) < 4 * math.sqrt(0.25 / values.size)


def test_dirac_and_eye_are_pytorchs():
    torch = pytest.importorskip("torch")
    for shape, groups in (((6, 3, 3, 3), 2), ((4, 6, 5), 1), ((6, 2, 3, 4, 5), 3)):
        np.testing.assert_array_equal(draw(init.dirac(groups), shape).reshape(shape),
                                      torch.nn.init.dirac_(torch.empty(shape), groups).numpy())
    np.testing.assert_array_equal(draw(init.eye, (4, 6)).reshape(4, 6), np.eye(4, 6))
    for name in ("linear", "tanh", "relu", "leaky_relu", "selu", "sigmoid"):
        assert init.calculate_gain(name) == pytest.approx(torch.nn.init.calculate_gain(name), rel=1e-15)


def test_sparse_columns_have_their_share_of_zeros_and_normal_values_elsewhere():
    values = draw(init.sparse(0.3, std=2.0), (50, 40)).reshape(50, 40)
    assert ((values == 0).sum(axis=0) == 15).all() and abs(values[values != 0].std() / 2 - 1) < 0.05
    assert len({tuple(np.flatnonzero(column == 0)) for column in values.T}) > 35


@pytest.mark.parametrize(("initialiser", "shape"), [
    (init.orthogonal(), (7, 9)), (init.truncated_normal(), (7, 9)), (init.dirac(), (7, 9, 3)), (init.sparse(0.4), (7, 9)),
    (init.eye, (7, 9))])
def test_a_part_made_alone_has_the_bits_of_the_whole(initialiser, shape):
    whole, n = draw(initialiser, shape), math.prod(shape)
    parts = [initialiser(1, a, b - a, shape, np) for a, b in ((0, 5), (5, n // 2), (n // 2, n))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_an_initialiser_of_matrices_refuses_what_is_none():
    for initialiser, shape in ((init.eye, (3,)), (init.sparse(0.5), (3, 3, 3)), (init.dirac(), (3, 3)),
                               (init.dirac(2), (3, 3, 1)), (init.orthogonal(), (3,))):
        with pytest.raises(ShapeError):
            draw(initialiser, shape)
    for wrong in (lambda: init.sparse(2.0), lambda: init.truncated_normal(low=1.0, high=0.0),
                  lambda: init.calculate_gain("swish")):
        with pytest.raises(ShapeError):
            wrong()
