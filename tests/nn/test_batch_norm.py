"""Batch norm's running statistics: once a step, whatever the micro-batches, ranks and recomputations."""

import numpy as np
import pytest

from mpitrain import nn, ops
from mpitrain.autograd import Tensor, recompute
from mpitrain.errors import ConfigError, ShapeError
from mpitrain.nn.across import Across

CLOSE = {"rtol": 0, "atol": 1e-12}


def images(step, n=4):
    return np.random.default_rng(step).standard_normal((n, 3, 5, 5)) * 2 + step


def made(layer=None):
    layer = layer or nn.BatchNorm2d(3)
    layer.initialize(dtype="float64")
    return layer


def test_three_training_steps_leave_pytorch_s_running_statistics():
    torch = pytest.importorskip("torch")
    ours, theirs = made(), torch.nn.BatchNorm2d(3).double()
    for step in range(3):
        y, expected = ours(images(step)), theirs(torch.tensor(images(step)))
        np.testing.assert_allclose(y.array, expected.detach().numpy(), **CLOSE)
        nn.apply_statistics(ours, nn.collect_statistics(ours))
    np.testing.assert_allclose(ours.running_mean.array, theirs.running_mean.numpy(), **CLOSE)
    np.testing.assert_allclose(ours.running_var.array, theirs.running_var.numpy(), **CLOSE)
    y, expected = ours.eval()(images(9)), theirs.eval()(torch.tensor(images(9)))
    np.testing.assert_allclose(y.array, expected.detach().numpy(), **CLOSE)


def test_forward_alone_changes_no_buffer():
    layer = made()
    layer(images(1))
    assert (layer.running_mean.array == 0).all() and (layer.running_var.array == 1).all()
    nn.apply_statistics(layer, nn.collect_statistics(layer))
    changed = layer.running_mean.array.copy()
    layer.eval()(images(2))
    nn.apply_statistics(layer, nn.collect_statistics(layer))
    np.testing.assert_array_equal(layer.running_mean.array, changed)


def test_a_step_folds_in_the_mean_over_its_micro_batches():
    layer = made()
    parts = [images(1), images(2), images(3)]
    for part in parts:
        layer(part)
    nn.apply_statistics(layer, nn.collect_statistics(layer))
    means = np.mean([p.mean(axis=(0, 2, 3)) for p in parts], axis=0)
    variances = np.mean([p.var(axis=(0, 2, 3), ddof=1) for p in parts], axis=0)
    np.testing.assert_allclose(layer.running_mean.array, 0.1 * means, **CLOSE)
    np.testing.assert_allclose(layer.running_var.array, 0.9 + 0.1 * variances, **CLOSE)


def test_statistics_of_several_ranks_are_summed_as_one_flat_array():
    together, ranks = made(), [made(), made()]
    for step in range(4):
        together(images(step))
        ranks[step % 2](images(step))
    nn.apply_statistics(together, nn.collect_statistics(together))
    flats = [nn.collect_statistics(rank) for rank in ranks]
    assert flats[0].shape == (7,) and flats[0].dtype == np.float64 and flats[0][-1] == 2
    for rank in ranks:
        nn.apply_statistics(rank, sum(flats))
        np.testing.assert_allclose(rank.running_var.array, together.running_var.array, **CLOSE)
    assert nn.collect_statistics(ranks[0])[-1] == 0        # taken


def test_sums_over_ranks_with_the_same_data_have_the_same_mean():
    layer, double = made(), made()
    layer(images(1))
    double(images(1))
    nn.apply_statistics(layer, nn.collect_statistics(layer))
    nn.apply_statistics(double, 2 * nn.collect_statistics(double))       # two ranks with the same data: the same mean
    np.testing.assert_allclose(layer.running_mean.array, double.running_mean.array, **CLOSE)


def test_a_recomputed_block_records_its_statistics_once():
    layer = made()
    x = Tensor(images(1), requires_grad=True)
    ops.sum(recompute(layer, x)).backward()
    assert nn.collect_statistics(layer)[-1] == 1


def test_the_statistics_of_all_layers_travel_together_and_must_fit():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))
    model.initialize(dtype="float64")
    model(images(1))
    assert nn.collect_statistics(model).shape == (14,)
    with pytest.raises(ShapeError, match=r"shape \(14,\), these \(7,\)"):
        nn.apply_statistics(model, np.zeros(7))
    assert nn.collect_statistics(nn.Sequential(nn.ReLU())).shape == (0,)


def test_a_synchronised_layer_sees_the_batches_of_all_ranks():
    """Two ranks as two passes: the first notes its sums, the second one adds them."""
    whole, sync = made(), made(nn.SyncBatchNorm(3))
    a, b = images(1, 2), images(2, 5)
    expected = whole(np.concatenate([a, b])).array
    sums = []
    sync.across = Across()
    sync.across.reduce = lambda array: sums.append(array.copy())
    sync(a)

    def add(array):
        array += sums[0]
    nn.collect_statistics(sync)
    sync.across.reduce = add
    np.testing.assert_allclose(sync(b).array, expected[2:], rtol=0, atol=1e-10)
    nn.apply_statistics(whole, nn.collect_statistics(whole))
    nn.apply_statistics(sync, nn.collect_statistics(sync))
    np.testing.assert_allclose(sync.running_var.array, whole.running_var.array, rtol=0, atol=1e-10)


def test_one_value_a_channel_and_wrong_shapes_are_refused():
    with pytest.raises(ShapeError, match="more than one value for each channel"):
        made()(np.ones((1, 3, 1, 1)))
    sync = made(nn.SyncBatchNorm(3))
    sync.across = Across()
    sync.across.reduce = lambda array: None
    with pytest.raises(ShapeError, match=r"SyncBatchNorm: training needs more than one value for each channel over all ranks"):
        sync(np.ones((1, 3)))
    with pytest.raises(ShapeError, match=r"BatchNorm2d expects 4 dims with 3 channels in dim 1, got shape \(2, 4, 5, 5\)"):
        made()(np.ones((2, 4, 5, 5)))
    with pytest.raises(ConfigError, match=r"momentum of batch norm lies in \(0, 1\], not 0"):
        nn.BatchNorm2d(3, momentum=0)
