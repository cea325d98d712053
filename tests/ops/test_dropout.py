"""Dropout: how much it drops, what its masks depend on, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from device_counts import counted
from fakegpu import put

from mpitrain import ops
from mpitrain.autograd import Tensor, recompute
from mpitrain.backend import asnumpy, random
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.kernels.dropout import Dropping, DroppingWindow
from tests.ops.parity import check_gradient


def scope(step=0, samples=None, seed=7):
    return random.use(random.Scope(seed, step, samples))


def drop(x, p=0.5, layer="drop", **options):
    with scope(**options):
        return ops.dropout(x, p, layer).array


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_share_p_is_dropped_and_the_rest_keeps_the_mean(p, dtype):
    y = drop(np.ones((100, 1000), dtype), p)
    assert y.dtype == dtype
    assert abs((y == 0).mean() - p) < 5 * np.sqrt(p * (1 - p) / y.size) + 1e-12
    np.testing.assert_allclose(y[y != 0], 1 / (1 - p), rtol=1e-6)


@pytest.mark.parametrize("width", [5, 8, 30])
def test_parts_of_samples_drop_what_the_whole_drops(width):
    """Also fused: in the norm of a residual sum, and heads of attention."""
    x = np.random.default_rng(0).standard_normal((3, 4, width))
    qkv = np.random.default_rng(1).standard_normal((3, 6, 3, 4, width))
    weight = np.ones(width)
    rows = np.array([7, 1, 1 << 40], np.uint64)

    def drops(x, qkv, part):
        heads = qkv.shape[3]
        with scope(samples=rows):
            plain = ops.dropout(x, 0.4, "a", part=part).array
            total, _ = ops.add_layer_norm(x, 2 * x, weight, dropout=0.4, layer="b", part=part)
            seen = ops.self_attention(qkv.reshape(3, 6, -1), heads, dropout=0.4, layer="c", part=part).array
        return plain, total.array, seen.reshape(3, 6, heads, width)

    whole = drops(x, qkv, 0)
    for part in range(2):
        mine = np.s_[2 * part:2 * part + 2]
        found = drops(x[:, mine], qkv[:, :, :, mine], part)
        for one, expected in zip(found, (whole[0][:, mine], whole[1][:, mine], whole[2][:, :, mine])):
            np.testing.assert_allclose(one, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("width", [5, 8])
@pytest.mark.parametrize("here", [np.array, put], ids=["host", "device"])
def test_positions_of_samples_drop_what_they_drop_in_the_whole(here, width):
    """Any of them, in any order; also fused in the norm of a residual sum, and of attention a window of the weights."""
    rng = np.random.default_rng(0)
    x, weight, rows = rng.standard_normal((3, 9, width)), np.ones(width), np.array([7, 1, 1 << 40], np.uint64)

    def drops(x, positions):
        given = Tensor(here(x), requires_grad=True)
        with scope(samples=rows):
            plain = ops.dropout(given, 0.4, "a", positions=positions)
            total, _ = ops.add_layer_norm(here(x), here(2 * x), here(weight), dropout=0.4, layer="b", positions=positions)
        plain.backward(here(np.ones(x.shape)))
        return [asnumpy(array) for array in (plain.array, total.array, given.grad)]

    some = np.array([1, 2, 8, 4])
    for found, whole in zip(drops(x[:, some], some), drops(x, None)):
        np.testing.assert_allclose(found, whole[:, some], rtol=1e-12, atol=1e-14)
    weights = here(np.ones((3, 4, 9, 10)))
    known = {"rows": here(rows), "key": 5, "p": 0.4}
    part = DroppingWindow(**known, whole=(9, 10), corner=(1, 4, 3)).factors(weights[:, 1:3, 4:8, 3:])
    np.testing.assert_array_equal(asnumpy(part), asnumpy(Dropping(**known).factors(weights))[:, 1:3, 4:8, 3:])


def test_positions_that_are_not_those_of_the_input_are_refused():
    with pytest.raises(ShapeError, match=r"3 positions, the input has shape \(2, 4, 5\): dim 1 is not as long"):
        ops.dropout(np.ones((2, 4, 5)), 0.5, "drop", positions=np.arange(3))


def test_the_gradient_passes_through_what_was_kept():
    x = Tensor(np.ones((6, 10)), requires_grad=True)
    with scope():
        y = ops.dropout(x, 0.5, "drop")
    y.backward(np.full((6, 10), 3.0))
    assert np.array_equal(x.grad, 3 * y.array)

    def at_one_place(x):
        with scope():
            return ops.dropout(x, 0.3, "drop")
    check_gradient(at_one_place, (4, 5))


def test_a_residual_is_added_to_what_is_dropped_and_gets_the_whole_gradient():
    x, around = (np.random.default_rng(i).standard_normal((6, 3, 11)) for i in range(2))
    upstream = np.random.default_rng(2).standard_normal(x.shape)
    leaves = [Tensor(a, requires_grad=True) for a in (x, around)]
    with scope():
        y = ops.dropout(leaves[0], 0.4, "drop", leaves[1])
    y.backward(upstream)
    assert np.array_equal(y.array, drop(x, 0.4) + around) and np.array_equal(leaves[1].grad, upstream)
    assert np.array_equal(leaves[0].grad, np.where(drop(np.ones_like(x), 0.4) > 0, upstream, 0) / 0.6)
    with pytest.raises(ShapeError, match=r"dropout: the residual has shape \(3,\), the input \(6, 3\): not equal"):
        ops.dropout(np.ones((6, 3)), 0.5, "drop", np.ones(3))


def test_the_mask_keeps_the_elements_whose_word_is_at_least_p():
    for p in (0.25, 1 - 2**-40):                  # the latter drops all: no word reaches it
        with scope(samples=np.array([4, 9, 2], np.uint64)):
            words = random.words(random.current().key("drop"), np.array([4, 9, 2], np.uint64), 2500, np)
        kept = drop(np.ones((3, 2500)), p, samples=np.array([4, 9, 2], np.uint64)) != 0
        assert np.array_equal(kept, words >= round(p * 2**32))


def test_masks_depend_on_seed_step_layer_and_use():
    x = np.ones((4, 50))
    masks = [drop(x), drop(x, seed=8), drop(x, step=1), drop(x, layer="other")]
    with scope():
        masks += [ops.dropout(x, 0.5, "twice").array, ops.dropout(x, 0.5, "twice").array]
    for i, a in enumerate(masks):
        assert all(not np.array_equal(a, b) for b in masks[:i])
    assert np.array_equal(masks[0], drop(x))


def test_masks_follow_the_samples_however_the_batch_is_split():
    x = np.ones((6, 3, 20))
    samples = np.array([11, 5, 3, 8, 1, 90], np.uint64)
    whole = drop(x, samples=samples)
    parts = [drop(x[rows], samples=samples[rows]) for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    assert np.array_equal(whole, np.concatenate(parts))
    folded = drop(x.reshape(18, 20), samples=samples)
    assert np.array_equal(folded[3:6], drop(x[1:2].reshape(3, 20), samples=samples[1:2]))


def test_recomputing_a_block_repeats_its_masks():
    x = Tensor(np.ones((5, 8)), requires_grad=True)
    with scope():
        y = recompute(lambda t: ops.dropout(ops.dropout(t, 0.5, "a"), 0.5, "a"), x)
        y.backward(np.ones((5, 8)))
    assert np.array_equal(x.grad, y.array)


def test_empty_batches_are_fine():
    assert drop(np.ones((0, 4))).shape == (0, 4)
    assert drop(np.ones((4, 0))).shape == (4, 0)


def test_a_dropped_nan_is_gone():
    y = drop(np.full((10, 10), np.nan))
    assert np.isnan(y).any() and (y == 0).any()


def test_impossible_dropout_is_refused():
    for p in (1.0, -0.1, float("nan")):
        with pytest.raises(ConfigError, match=f"dropout: p is {p}, expected at least 0 and less than 1"):
            ops.dropout(np.ones(3), p, "drop")
    with pytest.raises(ShapeError, match="dropout: the input has no dims"):
        ops.dropout(np.float64(1), 0.5, "drop")


@pytest.mark.parametrize(("rows", "most"), [
    (np.arange(7, 11, dtype=np.uint64), 0), (np.array([7, 1, 3, 1 << 40], np.uint64), 32)], ids=["consecutive", "any"])
def test_on_a_device_a_batch_sends_its_rows_at_most_once_and_waits_for_nothing(rows, most):
    """Layers share what they draw by, recomputed ones too. Masks are those of the host."""
    x = np.random.default_rng(0).standard_normal((4, 6, 16)).astype("float32")

    def layers(x, weight, first=0):
        for i in range(first, first + 3):
            x = ops.dropout(x, 0.2, f"drop.{i}", positions=np.arange(3, 9))
            x, y = ops.add_layer_norm(x, x, weight, dropout=0.3, layer=f"norm.{i}")
            x = x + ops.dropout(y, 0.1, f"last.{i}")
        return x

    found = []
    for here in (np.array, put):
        given, weight, grad = Tensor(here(x), requires_grad=True), here(np.ones(16, "float32")), here(np.ones_like(x))
        with scope(samples=rows), counted() as counts:
            y = recompute(lambda x, weight=weight: layers(x, weight), given)
            y = layers(y, weight, first=3)
            y.backward(grad)
        found.append((asnumpy(y.array), asnumpy(given.grad)))
    assert counts.up <= most + 6 * 8 and counts.n_syncs == counts.down == 0     # and the positions, once for all layers
    for host, device in zip(*found):
        np.testing.assert_array_equal(host == 0, device == 0)
        np.testing.assert_allclose(device, host, rtol=1e-4, atol=1e-4)
