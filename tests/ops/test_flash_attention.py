"""Attention by blocks: every edge of a block, bits that depend on a query alone, memory, and the array of all three parts."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mpitrain import models, nn, ops, optim
from mpitrain.autograd import Tensor, run_backward
from mpitrain.backend import random
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.kernels import KERNELS
from tests.ops.parity import check, check_gradient, normal

LENGTHS = [(1, 1), (1, 100), (7, 7), (63, 63), (64, 64), (65, 65), (100, 100), (100, 3), (33, 130), (16, 17)]
WIDTHS = [(1, 1), (5, 5), (32, 32), (64, 48), (128, 17)]


def plain(q, k, v, grad, causal, scale):
    """Result and gradients in float64, from the formula."""
    q, k, v, grad = (x.astype(np.float64) for x in (q, k, v, grad))
    scores = scale * q @ k.swapaxes(-1, -2)
    if causal:
        scores[..., ~np.tri(*scores.shape[-2:], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    slopes = grad @ v.swapaxes(-1, -2)
    slopes = scale * weights * (slopes - (slopes * weights).sum(-1, keepdims=True))
    return weights @ v, slopes @ k, slopes.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ grad


def ours(q, k, v, grad, causal, scale, operands=""):
    tensors = [Tensor(x, requires_grad=True) for x in (q, k, v)]
    result = ops.scaled_dot_product_attention(*tensors, is_causal=causal, scale=scale, operands=operands)
    run_backward(result, grad)
    return result.array, *(t.grad for t in tensors)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_edge_of_a_block_gives_the_formulas_values(lengths, causal):
    queries, keys = lengths
    for width, values in WIDTHS:
        for dtype, tolerance in (("float32", 5e-6), ("float64", 1e-13)):
            q, k, v, grad = (normal(2, 3, *shape, seed=i).astype(dtype) for i, shape in
                             enumerate([(queries, width), (keys, width), (keys, values), (queries, values)]))
            wanted = plain(q, k, v, grad, causal, 0.2)
            for name, a, b in zip(("result", "dq", "dk", "dv"), ours(q, k, v, grad, causal, 0.2), wanted):
                worst = np.abs(a - b).max() / max(np.abs(b).max(), 1.0)
                assert a.dtype == dtype and worst < tolerance, f"{name} at widths {width}, {values}, {dtype}: off by {worst:.1e}"


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_of_rounded_factors_every_edge_is_as_near_as_bfloat16_is(lengths, causal):
    """A product of two rounded numbers is off by 2^-8 of itself at most; the weights' gradients are sums of such products."""
    queries, keys = lengths
    for width, values in WIDTHS:
        q, k, v, grad = (normal(2, 3, *shape, seed=i).astype(np.float32) for i, shape in
                         enumerate([(queries, width), (keys, width), (keys, values), (queries, values)]))
        exact, wanted = plain(q, k, v, grad, causal, 0.2), ours(q, k, v, grad, causal, 0.2)
        for name, a, b, c in zip(("result", "dq", "dk", "dv"), ours(q, k, v, grad, causal, 0.2, "bfloat16"), exact, wanted):
            worst = np.abs(a - b).max() / max(np.abs(b).max(), 1.0)
            assert a.dtype == np.float32 and worst < 3 * 2.0 ** -8, f"{name} at widths {width}, {values}: off by {worst:.1e}"
            assert a.tobytes() != c.tobytes() or not b.any(), f"{name} at widths {width}, {values}: nothing was rounded"
    wide = [Tensor(x.astype(np.float64)) for x in (q, k, v)]
    rounded, plainly = (ops.scaled_dot_product_attention(*wide, operands=name).array for name in ("bfloat16", ""))
    assert rounded.tobytes() == plainly.tobytes(), "float64 is not rounded"


def test_attention_of_the_parts_of_one_array_equals_that_of_copies():
    qkv, grad = normal(2, 37, 3 * 4 * 8).astype(np.float32), normal(2, 37, 4 * 8, seed=1).astype(np.float32)
    x = Tensor(qkv, requires_grad=True)
    result = ops.self_attention(x, 4, causal=True)
    run_backward(result, grad)
    q, k, v = (np.ascontiguousarray(part.reshape(2, 37, 4, 8).swapaxes(1, 2)) for part in np.split(qkv, 3, axis=2))
    heads, *grads = ours(q, k, v, grad.reshape(2, 37, 4, 8).swapaxes(1, 2), True, None)
    assert np.array_equal(result.array, heads.swapaxes(1, 2).reshape(2, 37, 32))
    assert np.array_equal(x.grad, np.concatenate([g.swapaxes(1, 2).reshape(2, 37, 32) for g in grads], axis=2))


def test_self_attention_equals_pytorch():
    def theirs(x):
        q, k, v = (part.reshape(2, 9, 3, 4).transpose(1, 2) for part in x.split(12, dim=2))
        weights = (q @ k.transpose(2, 3) * 0.7).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(2, 9, 12)

    check(lambda x: ops.self_attention(x, 3, scale=0.7), theirs, (2, 9, 36))
    check_gradient(lambda x: ops.self_attention(x, 3, causal=True), (2, 9, 36))


@pytest.mark.parametrize("operands", ["", "bfloat16"])
def test_a_query_has_the_same_bits_alone_and_in_any_batch(operands):
    qkv = normal(5, 100, 3 * 2 * 24).astype(np.float32)
    grad = normal(5, 100, 2 * 24, seed=1).astype(np.float32)

    def run(samples, length):
        x = Tensor(qkv[samples, :length], requires_grad=True)
        result = ops.self_attention(x, 2, causal=True, operands=operands)
        run_backward(result, grad[samples, :length])
        return result.array, x.grad

    whole, slope = run(slice(None), 100)
    one, one_slope = run(slice(3, 4), 100)
    assert one.tobytes() == whole[3:4].tobytes() and one_slope.tobytes() == slope[3:4].tobytes()
    for length in (41, 42, 43, 50, 65):           # what comes later is hidden, and leaves no trace
        short, _ = run(slice(None), length)
        assert short.tobytes() == np.ascontiguousarray(whole[:, :length]).tobytes(), length


def test_no_matrix_of_weights_is_kept_or_made():
    if KERNELS["flash_attention"].host() is None:
        pytest.skip("no C compiler")
    length = 1024                                  # weights of one head: 4 MiB
    qkv = Tensor(normal(1, length, 3 * 2 * 16).astype(np.float32), requires_grad=True)
    tracemalloc.start()
    try:
        result = ops.self_attention(qkv, 2, causal=True)
        run_backward(result, np.ones(result.shape, np.float32))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * qkv.array.nbytes / 3 < 4 * length * length / 2


def test_a_nan_shows_wherever_it_can_be_seen_and_large_scores_do_not_overflow():
    x = normal(1, 70, 3, 1, 4).astype(np.float32)
    x[0, 40, 1] = np.nan                                                         # a key
    result = ops.self_attention(x.reshape(1, 70, 12), 1, causal=True).array[0]
    assert np.isfinite(result[:40]).all() and np.isnan(result[40:]).all()
    x = normal(1, 70, 3, 1, 4).astype(np.float32)
    x[0, 40, 2, 0, 1] = np.nan                                                   # a number of a value
    result = ops.self_attention(x.reshape(1, 70, 12), 1, causal=True).array[0]
    assert np.isnan(result[40:, 1]).all() and np.isfinite(result[:, [0, 2, 3]]).all()
    huge = Tensor(1e4 * normal(1, 70, 12).astype(np.float32), requires_grad=True)
    result = ops.self_attention(huge, 1)
    run_backward(result, np.ones(result.shape, np.float32))
    assert np.isfinite(result.array).all() and np.isfinite(huge.grad).all()


def test_only_the_gradients_asked_for_are_made():
    q, k, v = (normal(1, 2, 5, 3, seed=i) for i in range(3))
    grad = normal(1, 2, 5, 3, seed=3)
    wanted = ours(q, k, v, grad, True, 0.5)[1:]
    for i in range(3):
        tensors = [Tensor(x, requires_grad=i == j) for j, x in enumerate((q, k, v))]
        run_backward(ops.scaled_dot_product_attention(*tensors, is_causal=True, scale=0.5), grad)
        assert [t.grad is not None for t in tensors] == [i == j for j in range(3)]
        assert np.array_equal(tensors[i].grad, wanted[i])


def test_what_is_saved_may_not_change_before_backward():
    qkv = Tensor(normal(1, 5, 12), requires_grad=True)
    result = ops.self_attention(ops.multiply(qkv, 2.0), 2)
    result.array[...] = 0
    result.mark_changed()
    with pytest.raises(Exception, match="SelfAttention: an array it saved for backward was changed in place"):
        run_backward(result, np.ones(result.shape))


def losses(steps):
    model = models.gpt(layers=2, heads=2, width=16, block=24, vocabulary=11)
    model.initialize(0).attach_gradients()
    optimizer, loss_of = optim.AdamW(model, lr=1e-3), nn.LOSSES["cross_entropy"]()
    x, found = np.random.default_rng(0).integers(0, 11, (4, 24)), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(Tensor(x)), x[:, ::-1].copy())
        found.append(float(loss.array) / x.size)
        run_backward(loss, np.asarray(1 / x.size, np.float32))
        optimizer.update(model.storage.gradients, lr=1e-3, step=step + 1)
    return found


def test_a_transformer_learns_as_with_the_plain_expression(monkeypatch):
    fast = losses(50)
    for name in ("flash_attention", "flash_attention_grad"):
        monkeypatch.setattr(KERNELS[name], "host", lambda: None)
    np.testing.assert_allclose(fast, losses(50), rtol=1e-5)
    assert fast[-1] < 0.95 * fast[0]


@pytest.mark.parametrize("heads", [0, 5])
def test_an_array_that_has_no_such_parts_is_refused(heads):
    with pytest.raises(ShapeError, match=rf"self_attention: expected qkv \(batch, length, 3 x {heads} heads x width\), "
                                         r"found \(2, 3, 12\)"):
        ops.self_attention(np.zeros((2, 3, 12)), heads)


def dropped_by_parts(qkv, heads, causal, p):
    """self_attention with dropout, from ops that show the weights."""
    batch, length, width = qkv.shape
    q, k, v = (ops.swapaxes(ops.reshape(part, batch, length, heads, width // 3 // heads), 1, 2)
               for part in ops.split(qkv, width // 3, dim=-1))
    scores = q @ ops.swapaxes(k, 2, 3) * (1 / np.sqrt(width // 3 // heads)).astype(qkv.array.dtype)
    if causal:
        scores = ops.where(np.tri(length, dtype=bool), scores, np.full((), -1e30, qkv.array.dtype))
    weights = ops.dropout(ops.softmax(scores), p, "here")
    return ops.reshape(ops.swapaxes(weights @ v, 1, 2), batch, length, width // 3)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("length", [1, 3, 31, 32, 33, 64, 70, 131])
def test_dropped_weights_are_those_that_dropout_of_the_whole_matrix_drops(length, causal):
    for dtype, tolerance in (("float32", 5e-6), ("float64", 1e-13)):
        values, grad = normal(3, length, 3 * 2 * 5).astype(dtype), normal(3, length, 10, seed=1).astype(dtype)
        found = []
        for run in (lambda x: ops.self_attention(x, 2, causal=causal, dropout=0.3, layer="here"),
                    lambda x: dropped_by_parts(x, 2, causal, 0.3)):
            x = Tensor(values, requires_grad=True)
            with random.use(random.Scope(seed=7, step=2, samples=np.array([4, 90, 1 << 40], np.uint64))):
                result = run(x)
            run_backward(result, grad)
            found.append((result.array, x.grad))
        for a, b in zip(*found):
            assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1)


def test_a_part_of_a_batch_drops_what_the_batch_drops():
    qkv = normal(4, 37, 3 * 2 * 8).astype(np.float32)

    def run(samples):
        with random.use(random.Scope(seed=7, samples=np.arange(4, dtype=np.uint64)[samples])):
            return ops.self_attention(qkv[samples], 2, causal=True, dropout=0.5, layer="here").array

    assert run(slice(1, 3)).tobytes() == np.ascontiguousarray(run(slice(0, 4))[1:3]).tobytes()


def test_a_probability_of_dropout_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="self_attention: dropout is 1.0, expected at least 0 and less than 1"):
        ops.self_attention(np.ones((1, 2, 12)), 2, dropout=1.0)
