"""Pools of one to three dims against PyTorch, with the native loops and with plain arrays; their second derivatives."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor, grad
from mpitrain.errors import ShapeError
from mpitrain.kernels import pool
from tests.ops.parity import apart, check


@pytest.fixture(params=["native", "plain arrays"], autouse=True)
def version(request, monkeypatch):
    if request.param == "plain arrays":
        for kernel in (pool.window_maximum, pool.window_maximum_gradient, pool.window_total, pool.window_total_gradient):
            monkeypatch.setattr(kernel, "host", lambda: None)


def functions():
    return pytest.importorskip("torch").nn.functional


SHAPES = {1: (2, 3, 11), 2: (3, 7, 6), 3: (2, 5, 6, 4)}
WINDOWS = [(2, None, 0), (3, 2, 1), (3, 1, 0)]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_pools_of_all_dims_equal_pytorch(dims, window):
    f, shape = functions(), SHAPES[dims]
    for ceil, dilation, indices in ((False, 1, False), (True, 1, True), (True, 2, False), (False, 1, True)):
        if dilation == 2 and window[0] == 3 and dims == 3:
            continue                              # does not fit
        options = {"ceil_mode": ceil, "dilation": dilation, "return_indices": indices}
        ours, theirs = getattr(ops, f"max_pool{dims}d"), getattr(f, f"max_pool{dims}d")
        check(lambda x, o=options, g=ours: g(x, *window, **o), lambda x, o=options, g=theirs: g(x, *window, **o), apart(*shape))
    for ceil, inside in product((False, True), (False, True)):
        options = {"ceil_mode": ceil, "count_include_pad": inside}
        ours, theirs = getattr(ops, f"avg_pool{dims}d"), getattr(f, f"avg_pool{dims}d")
        check(lambda x, o=options, g=ours: g(x, *window, **o), lambda x, o=options, g=theirs: g(x, *window, **o), shape)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_adaptive_pools_of_all_dims_equal_pytorch(dims, size):
    f, shape = functions(), SHAPES[dims]
    ours, theirs = getattr(ops, f"adaptive_avg_pool{dims}d"), getattr(f, f"adaptive_avg_pool{dims}d")
    check(lambda x: ours(x, size), lambda x: theirs(x, size), shape)
    for indices in (False, True):
        ours, theirs = getattr(ops, f"adaptive_max_pool{dims}d"), getattr(f, f"adaptive_max_pool{dims}d")
        check(lambda x, i=indices, g=ours: g(x, size, i), lambda x, i=indices, g=theirs: g(x, size, i), apart(*shape))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_unpooling_and_pools_of_powers_equal_pytorch(dims):
    f, shape = functions(), SHAPES[dims]
    ours, theirs = (lambda x, m=m: getattr(m, f"max_unpool{dims}d")(
        *getattr(m, f"max_pool{dims}d")(x, 2, 2, return_indices=True), 2, output_size=shape[-dims:]) for m in (ops, f))
    check(ours, theirs, apart(*shape))
    ours, theirs = (lambda x, m=m: getattr(m, f"lp_pool{dims}d")(abs(x) + 0.5, 3.0, 2) for m in (ops, f))
    check(ours, theirs, shape)


def test_divisors_and_dims_that_are_kept_equal_pytorch():
    f = functions()
    check(lambda x: ops.avg_pool2d(x, 3, 2, 1, divisor_override=5), lambda x: f.avg_pool2d(x, 3, 2, 1, divisor_override=5),
          (1, 2, 7, 6))
    check(lambda x: ops.adaptive_avg_pool2d(x, (None, 2)), lambda x: f.adaptive_avg_pool2d(x, (None, 2)), (1, 2, 7, 6))


@pytest.mark.parametrize("op", [lambda x: ops.max_pool2d(x, 3, 2, 1), lambda x: ops.max_pool2d(x, 2, relu=True),
                                lambda x: ops.avg_pool2d(x, 3, 2, 1), lambda x: ops.max_pool1d(x[0], 3, dilation=2),
                                lambda x: ops.avg_pool3d(x, 2), lambda x: ops.max_pool3d(x, 2)])
def test_second_derivatives_are_those_of_the_square_of_a_pool(op):
    x = Tensor(apart(1, 2, 5, 6) / 3, requires_grad=True)
    direction = np.random.default_rng(0).standard_normal(x.shape)

    def slope(values):
        leaf = Tensor(values, requires_grad=True)
        first, = grad((op(leaf) ** 3).sum(), leaf, create_graph=True)
        return leaf, first

    leaf, first = slope(x.array)
    second, = grad((first * direction).sum(), leaf)
    step = 1e-5
    numeric = (slope(x.array + step * direction)[1].array - slope(x.array - step * direction)[1].array) / (2 * step)
    np.testing.assert_allclose(second.array, numeric, rtol=1e-6, atol=1e-6)


def test_pools_that_do_not_fit_are_refused():
    x = np.zeros((1, 2, 4))
    cases = [
        (lambda: ops.max_pool1d(x, 5), r"max_pool1d: the window \(5,\) .* does not fit into an input of \(4,\)"),
        (lambda: ops.max_pool3d(x, 2), r"the input has shape \(1, 2, 4\), expected \(N, C, D, H, W\), or that without N"),
        (lambda: ops.max_pool1d(x, 2, padding=2), "padding is .2,.; it must be between 0 and half"),
        (lambda: ops.adaptive_avg_pool1d(x, (2, 2)), "output_size is .2, 2., expected an integer of at least 1, or 1 of them"),
        (lambda: ops.max_pool2d(x, 2, relu=True, return_indices=True), "relu with return_indices"),
        (lambda: ops.avg_pool2d(x, 2, divisor_override=0), "divisor_override is 0"),
        (lambda: ops.max_unpool1d(x, np.full((1, 2, 4), 9), 2), r"indices are 9 ... 9, expected places in an output of \(8,\)"),
        (lambda: ops.max_unpool1d(x, np.zeros((1, 2, 4)), 2), "indices are float64 of shape .1, 2, 4., expected integers"),
    ]
    for call, message in cases:
        with pytest.raises(ShapeError, match=message):
            call()
