"""Normalisation against PyTorch and against statistics of the whole batch, and what is refused."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest

from mpitrain import ops
from mpitrain.autograd import Tensor, run_backward
from mpitrain.errors import ShapeError
from mpitrain.kernels import KERNELS
from tests.ops.parity import Trained, check, check_gradient, normal, positive

SHAPES = [(4, 3), (2, 3, 5), (3, 2, 4, 6), (2, 4, 33, 3), (1, 2, 40)]
BY_NAME = ("channel_moments", "channel_affine", "channel_sums", "channel_combine", "batch_norm", "batch_norm_gradients")


@pytest.fixture(params=["native", "plain arrays"])
def version(request, monkeypatch):
    if request.param == "plain arrays":
        for name in BY_NAME:
            monkeypatch.setattr(KERNELS[name], "host", lambda: None)


def functions():
    return pytest.importorskip("torch").nn.functional


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm_equals_pytorch(shape, version):
    f, c = functions(), shape[1]
    check(lambda x, w, b: ops.batch_norm(x, w, b, eps=1e-3)[0],
          lambda x, w, b: f.batch_norm(x, None, None, w, b, training=True, eps=1e-3), shape, (c,), (c,))
    check(lambda x: ops.batch_norm(x + 30)[0], lambda x: f.batch_norm(x + 30, None, None, training=True), shape,
          dtypes=["float64"])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm_with_relu_and_residual_equals_pytorch(shape, version):
    f, c = functions(), shape[1]
    mean, variance = normal(c), positive(c)
    import torch

    def theirs(x, w, b, r=None):
        y = f.batch_norm(x, None, None, w, b, training=True)
        return (y if r is None else y + r).relu()

    check(lambda x, w, b, r: ops.batch_norm(x, w, b, residual=r)[0],
          lambda x, w, b, r: f.batch_norm(x, None, None, w, b, training=True) + r, shape, (c,), (c,), shape)
    for reduce in (None, lambda array: array):               # the latter makes one rank of what is otherwise for several
        norm_relu = functools.partial(ops.batch_norm, relu=True, reduce=reduce)
        check(lambda *xs, f=norm_relu: f(*xs)[0], theirs, shape, (c,), (c,))
        check(lambda x, w, b, r, f=norm_relu: f(x, w, b, residual=r)[0], theirs, shape, (c,), (c,), shape)
    check(lambda x, w, b, r: ops.batch_norm_inference(x, mean, variance, w, b, residual=r, relu=True),
          lambda x, w, b, r: (f.batch_norm(x, torch.tensor(mean), torch.tensor(variance), w, b) + r).relu(),
          shape, (c,), (c,), shape, dtypes=["float64"])


def test_channels_that_are_normalised_together_or_one_by_one_have_the_same_bits():
    x, upstream = (np.random.default_rng(i).standard_normal((40, 7, 50, 50)).astype(np.float32) for i in range(2))
    for relu in (False, True):
        whole = Tensor(x, requires_grad=True)
        y = ops.batch_norm(whole, relu=relu)[0]
        y.backward(upstream)
        for channels in (slice(0, 1), slice(2, 7)):
            part = Tensor(x[:, channels].copy(), requires_grad=True)
            z = ops.batch_norm(part, relu=relu)[0]
            z.backward(upstream[:, channels].copy())
            assert np.array_equal(z.array, y.array[:, channels]) and np.array_equal(part.grad, whole.grad[:, channels])


def test_a_residual_of_another_shape_is_refused():
    with pytest.raises(ShapeError, match=r"batch_norm: the residual has shape \(1, 3, 2\), the input \(4, 3, 2\): not equal"):
        ops.batch_norm(np.ones((4, 3, 2)), residual=np.ones((1, 3, 2)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm_with_given_statistics_equals_pytorch(shape, version):
    f, c = functions(), shape[1]
    mean, variance = normal(c), positive(c)
    import torch
    check(lambda x, w, b: ops.batch_norm_inference(x, mean, Tensor(variance), w, b),
          lambda x, w, b: f.batch_norm(x, torch.tensor(mean), torch.tensor(variance), w, b), shape, (c,), (c,),
          dtypes=["float64"])
    check(lambda x: ops.batch_norm_inference(x, mean.astype(np.float32), variance.astype(np.float32)),
          lambda x: f.batch_norm(x, torch.tensor(mean), torch.tensor(variance)), shape, dtypes=["float32"])


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_equals_pytorch(groups, version):
    f = functions()
    for shape in ((3, 6, 4, 5), (2, 6, 7), (0, 6, 3)):
        check(lambda x, w, b: ops.group_norm(x, groups, w, b), lambda x, w, b: f.group_norm(x, groups, w, b), shape, (6,), (6,))
    check(lambda x: ops.group_norm(x, groups), lambda x: f.group_norm(x, groups), (2, 6, 3))


def test_norms_pass_the_gradient_check():
    check_gradient(lambda x, w, b: ops.batch_norm(x, w, b)[0], (4, 3, 5), (3,), (3,))
    check_gradient(lambda x, w, b: ops.group_norm(x, 2, w, b), (2, 4, 5), (4,), (4,))


def test_batch_norm_hands_out_mean_biased_variance_and_count():
    x = normal(4, 3, 5) * 2 + 10
    _, mean, variance, count = ops.batch_norm(x)
    assert count == 20
    np.testing.assert_allclose(mean, x.mean(axis=(0, 2)), rtol=1e-14)
    np.testing.assert_allclose(variance, x.var(axis=(0, 2)), rtol=1e-12)


@pytest.mark.parametrize("split", [False, True], ids=["one call", "two calls"])
def test_batch_norm_over_ranks_equals_batch_norm_of_the_whole_batch(split):
    """Three threads stand for ranks with 5, 0 and 3 samples; each sums over them with a reduction of its own."""
    x, g, w, b = normal(8, 3, 6) + 5, normal(8, 3, 6, seed=1), normal(3, seed=2), normal(3, seed=3)
    whole, weight, bias = (Tensor(a, requires_grad=True) for a in (x, w, b))
    y, mean, variance, count = ops.batch_norm(whole, weight, bias)
    y.backward(g)

    parts, results, shared = [slice(0, 5), slice(5, 5), slice(5, 8)], {}, {}
    barrier = threading.Barrier(3, timeout=20)

    def run(rank):
        def reduce(array):
            assert array.dtype == np.float64
            shared[rank] = array.copy()
            barrier.wait()
            array[...] = shared[0] + shared[1] + shared[2]
            barrier.wait()
        mine, w_mine, b_mine = Tensor(x[parts[rank]], requires_grad=True), Trained(w, True), Trained(b, True)
        out, *statistics = ops.batch_norm(mine, w_mine, b_mine, reduce=reduce)
        later = run_backward(out, g[parts[rank]], split=split)
        if later is not None:
            later.run()
        results[rank] = out.array, mine.grad, w_mine.grad, b_mine.grad, statistics

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for rank in range(3):
        out, dx, _, _, (m, v, n) = results[rank]
        np.testing.assert_allclose(out, y.array[parts[rank]], atol=1e-12)
        np.testing.assert_allclose(dx, whole.grad[parts[rank]], atol=1e-12)
        np.testing.assert_allclose(m, mean, atol=1e-12)
        np.testing.assert_allclose(v, variance, atol=1e-12)
        assert n == count
    np.testing.assert_allclose(sum(results[r][2] for r in range(3)), weight.grad, atol=1e-12)
    np.testing.assert_allclose(sum(results[r][3] for r in range(3)), bias.grad, atol=1e-12)


def test_shapes_that_do_not_fit_are_refused():
    x = np.zeros((2, 4, 3))
    with pytest.raises(ShapeError, match=r"batch_norm: training needs more than one value .*, the input is \(1, 4\)"):
        ops.batch_norm(np.zeros((1, 4)))
    with pytest.raises(ShapeError, match=r"batch_norm: the input has shape \(4,\), expected \(N, C, ...\)"):
        ops.batch_norm(np.zeros(4))
    with pytest.raises(ShapeError, match=r"batch_norm_inference: the weight has shape \(3,\), the input has 4 channels"):
        ops.batch_norm_inference(x, np.zeros(4), np.ones(4), np.ones(3))
    with pytest.raises(ShapeError, match="group_norm: 4 channels cannot be split into 3 groups"):
        ops.group_norm(x, 3)


def test_images_of_no_length_have_gradients_of_zero() -> None:
    x, w, b = (Tensor(np.zeros(shape, np.float32), requires_grad=True) for shape in ((2, 6, 0), (6,), (6,)))
    mean, variance = np.zeros(6, np.float32), np.ones(6, np.float32)
    for y in (ops.group_norm(x, 2, w, b), ops.batch_norm_inference(x, mean, variance, w, b)):
        w.grad = b.grad = None
        run_backward(y, np.empty((2, 6, 0), np.float32))
        assert not w.grad.any() and not b.grad.any()
