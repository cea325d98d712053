"""Pooling against PyTorch, with the native loops and with plain arrays, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor, run_backward
from mpitrain.errors import ShapeError
from mpitrain.kernels import pool
from mpitrain.kernels.pool import subsample, subsample_gradient
from tests.ops.parity import apart, check, check_gradient


@pytest.fixture(params=["native", "plain arrays"], autouse=True)
def version(request, monkeypatch):
    if request.param == "plain arrays":
        for kernel in (pool.window_maximum, pool.window_maximum_gradient, pool.window_total, pool.window_total_gradient,
                       subsample, subsample_gradient):
            monkeypatch.setattr(kernel, "host", lambda: None)


def functions():
    return pytest.importorskip("torch").nn.functional


WINDOWS = [(2, None, 0), (3, 2, 1), ((2, 3), (1, 2), (1, 0)), (3, 1, 1), (1, 2, 0), (5, 5, 2)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 7, 8), (1, 1, 5, 5)], ids=str)
def test_pooling_equals_pytorch(window, shape):
    f = functions()
    check(lambda x: ops.max_pool2d(x, *window), lambda x: f.max_pool2d(x, *window), apart(*shape))
    check(lambda x: ops.avg_pool2d(x, *window), lambda x: f.avg_pool2d(x, *window), shape)
    check(lambda x: ops.avg_pool2d(x, *window, count_include_pad=False),
          lambda x: f.avg_pool2d(x, *window, count_include_pad=False), shape)


@pytest.mark.parametrize("size", [1, 3, (2, 5), (7, 8), (9, 11)], ids=str)
def test_adaptive_pooling_equals_pytorch(size):
    f = functions()
    check(lambda x: ops.adaptive_max_pool2d(x, size), lambda x: f.adaptive_max_pool2d(x, size), apart(2, 3, 7, 8))
    check(lambda x: ops.adaptive_avg_pool2d(x, size), lambda x: f.adaptive_avg_pool2d(x, size), (2, 3, 7, 8))


def test_pooling_passes_the_gradient_check():
    check_gradient(lambda x: ops.max_pool2d(x, 3, 2, 1), apart(2, 2, 6, 5))
    check_gradient(lambda x: ops.adaptive_avg_pool2d(x, (4, 3)), (2, 2, 6, 5))


@pytest.mark.parametrize("window", [(2, None, 0), (3, 2, 1)], ids=str)
def test_relu_in_pooling_is_relu_before_it_and_after_it(window):
    x = np.random.default_rng(0).standard_normal((3, 4, 9, 11)).astype(np.float32) - 1
    results = []
    for pooled in (lambda t: ops.max_pool2d(t, *window, relu=True), lambda t: ops.max_pool2d(ops.relu(t), *window),
                   lambda t: ops.relu(ops.max_pool2d(t, *window))):
        leaf = Tensor(x, requires_grad=True)
        y = pooled(leaf)
        run_backward(y, np.full(y.shape, 1.5, np.float32))
        results.append((y.array, leaf.grad))
    assert 0 < (results[0][0] == 0).mean() < 1
    for y, gradient in results[1:]:
        np.testing.assert_array_equal(results[0][0], y)
        np.testing.assert_array_equal(results[0][1], gradient)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("channels", [(0, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 2, 5, 37), (2, 1, 1, 1)], ids=str)
def test_subsampling_equals_slicing_and_padding(shape, channels, stride):
    f = functions()
    check(lambda x: ops.subsample2d(x, stride, channels),
          lambda x: f.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, *channels)), shape)


def test_subsampling_refuses_what_is_no_stride_or_number_of_channels():
    x = np.zeros((1, 1, 4, 4))
    with pytest.raises(ShapeError, match=r"subsample2d: the stride is 0, expected at least 1"):
        ops.subsample2d(x, 0)
    with pytest.raises(ShapeError, match=r"the channels to add are \(1, -1\), expected two numbers of at least 0"):
        ops.subsample2d(x, 2, (1, -1))
    with pytest.raises(ShapeError, match=r"has shape \(4, 4\), expected \(N, C, H, W\)"):
        ops.subsample2d(x[0, 0], 2)


def test_no_images_give_no_images():
    for op in (ops.max_pool2d, ops.avg_pool2d):
        assert op(np.zeros((0, 2, 4, 4), np.float32), 2).shape == (0, 2, 2, 2)


def test_a_nan_in_a_window_is_its_maximum_and_a_tie_goes_to_the_first():
    x = np.zeros((1, 1, 2, 4))
    x[0, 0, 1, 2] = np.nan
    tensor = ops.negative(x)
    assert np.isnan(ops.max_pool2d(x, 2).array).tolist() == [[[[False, True]]]]
    leaf = type(tensor)(np.ones((1, 1, 2, 2)), requires_grad=True)
    ops.max_pool2d(leaf, 2).backward()
    assert leaf.grad.tolist() == [[[[1, 0], [0, 0]]]]


@pytest.mark.parametrize("op", [ops.max_pool2d, ops.avg_pool2d])
def test_windows_that_do_not_fit_are_refused(op):
    x = np.zeros((1, 1, 4, 4))
    with pytest.raises(ShapeError, match=r"the window \(5, 5\) .* does not fit into an input of \(4, 4\) with"):
        op(x, 5)
    with pytest.raises(ShapeError, match="padding is .2, 2.; it must be between 0 and half of the kernel"):
        op(x, 2, padding=2)
    with pytest.raises(ShapeError, match="expected an integer of at least 1"):
        op(x, 2, 0)
    with pytest.raises(ShapeError, match=r"has shape \(4, 4\), expected \(N, C, H, W\)"):
        op(x[0, 0], 2)


@pytest.mark.parametrize("op", [ops.adaptive_max_pool2d, ops.adaptive_avg_pool2d])
def test_images_are_not_cut_into_nothing(op):
    with pytest.raises(ShapeError, match=r"output_size is .0, 2., expected an integer of at least 1"):
        op(np.zeros((1, 1, 4, 4)), (0, 2))


@pytest.mark.parametrize("shape", [(1, 1, 0, 4), (2, 3, 4, 0)])
def test_the_mean_of_a_window_of_padding_alone_is_zero(shape):
    found = ops.avg_pool2d(Tensor(np.empty(shape, np.float32)), 2, 2, 1)
    assert found.size and not found.array.any()


@pytest.mark.parametrize("side", [7, 29, 64])
def test_the_mean_of_a_plane_is_the_same_alone_and_beside_others(side):
    x = np.random.default_rng(side).standard_normal((1, 11, side, side), np.float32)
    together = ops.avg_pool2d(Tensor(x), side).array
    alone = np.concatenate([ops.avg_pool2d(Tensor(x[:, c:c + 1].copy()), side).array for c in range(11)], axis=1)
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_allclose(together, x.mean((2, 3), np.float64, keepdims=True), rtol=0, atol=1e-7)
