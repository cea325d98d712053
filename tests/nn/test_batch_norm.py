"""Batch norm's running statistics: in each forward, or once a step, whatever the micro-batches, ranks and recomputations."""

import numpy as np
import pytest

from mpitrain import autograd, nn, ops, optim
from mpitrain.autograd import Tensor, gradcheck, no_grad, recompute
from mpitrain.errors import ArgumentError, ConfigError, ShapeError
from mpitrain.nn.across import Across

CLOSE = {"rtol": 0, "atol": 1e-12}


def images(step, n=4):
    return np.random.default_rng(step).standard_normal((n, 3, 5, 5)) * 2 + step


def made(layer=None, *, deferred=True):
    layer = layer or nn.BatchNorm2d(3)
    layer.initialize(dtype="float64")
    nn.defer_statistics(layer, deferred)
    return layer


def test_fifty_steps_of_a_plain_loop_leave_pytorch_s_running_statistics():
    torch = pytest.importorskip("torch")
    ours = nn.Sequential(nn.BatchNorm1d(3), nn.spectral_norm(nn.Linear(3, 4)), nn.BatchNorm1d(4, momentum=None))
    theirs = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 4)),
                                 torch.nn.BatchNorm1d(4, momentum=None)).double()
    storage = ours.initialize(seed=0, dtype="float64")
    state = {name: torch.tensor(values.copy()) for name, values in ours.state_dict().items()}
    spectral = theirs[1].parametrizations
    with torch.no_grad():
        spectral.weight.original.copy_(state["1.original"])
        theirs[1].bias.copy_(state["1.layer.bias"])
        spectral.weight[0]._u.copy_(state["1.u"])
        spectral.weight[0]._v.copy_(state["1.v"])
    mine, other = optim.SGD(storage, lr=0.01), torch.optim.SGD(theirs.parameters(), lr=0.01)
    for step in range(50):
        x = np.random.default_rng(step).standard_normal((32, 3)) * 5 + 10
        for optimizer, y in ((mine, ours(Tensor(x))), (other, theirs(torch.tensor(x)))):
            loss = ((y - 1) ** 2).sum() / 32
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for place in (0, 2):
        for name in ("running_mean", "running_var"):
            np.testing.assert_allclose(getattr(ours[place], name).array, getattr(theirs[place], name).numpy(), rtol=1e-10)
    assert ours[0].running_mean.array.min() > 8 and ours[2].num_batches_tracked.array == 50
    np.testing.assert_allclose(np.abs(ours[1].u.array), np.abs(spectral.weight[0]._u.numpy()), rtol=1e-8)
    np.testing.assert_allclose(ours.eval()(x).array, theirs.eval()(torch.tensor(x)).detach().numpy(), rtol=1e-8, atol=1e-10)


def test_a_plain_forward_leaves_the_bits_of_a_step_of_one_micro_batch():
    for layer in (nn.BatchNorm2d, lambda c: nn.BatchNorm2d(c, momentum=None), lambda c: nn.spectral_norm(nn.Conv2d(c, 4, 2))):
        plain, stepped = made(layer(3), deferred=False), made(layer(3))
        for step in range(3):
            plain(images(step))
            stepped(images(step))
            nn.apply_statistics(stepped, nn.collect_statistics(stepped))
        for (name, a), (_, b) in zip(plain.named_buffers(), stepped.named_buffers()):
            np.testing.assert_array_equal(a.array, b.array, err_msg=name)


def test_recomputing_and_gradcheck_move_nothing_and_evaluation_neither():
    layer, alike = made(deferred=False), made(deferred=False)
    ops.sum(recompute(layer, Tensor(images(1), requires_grad=True))).backward()
    with no_grad():
        alike(images(1))                                       # as PyTorch's: the mode counts, not the graph
    np.testing.assert_array_equal(layer.running_mean.array, alike.running_mean.array)
    assert (layer.running_mean.array != 0).all()
    gradcheck(lambda x: layer(x) * images(3), images(2), tolerance=1e-5)
    layer.eval()(images(2))
    np.testing.assert_array_equal(layer.running_mean.array, alike.running_mean.array)
    spectral = made(nn.spectral_norm(nn.Linear(3, 4)), deferred=False)
    gradcheck(spectral, np.random.default_rng(0).standard_normal((2, 3)))


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


def test_a_deferred_forward_alone_changes_no_buffer():
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


@pytest.mark.parametrize("name", ["relu", "relu6", "hardswish", "silu", "leaky_relu", None])
@pytest.mark.parametrize("shape", [(8, 5, 3, 3), (4, 3, 9, 9), (6, 4, 1, 1)], ids=str)
def test_an_activation_after_it_is_pytorch_s(name, shape):
    """In eval, in training, with a residual; first and second derivatives."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, around, grad = (3 * rng.normal(size=shape) for _ in range(3))
    after = getattr(torch.nn.functional, name) if name else lambda y: y
    layer = nn.BatchNorm2d(shape[1], activation=name)
    layer.initialize(dtype="float64")
    layer.weight.array[...], layer.bias.array[...] = 4 * rng.normal(size=(2, shape[1]))
    known = {"weight": torch.tensor(layer.weight.array.copy()), "bias": torch.tensor(layer.bias.array.copy())}
    for training in (True, False):
        for residual in (None, around):
            layer.train(training)
            mean, var = (None, None) if training else (torch.zeros(shape[1]).double(), torch.ones(shape[1]).double())
            layer.running_mean.array[...], layer.running_var.array[...] = 0, 1
            ours, theirs = Tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True)
            normal = torch.nn.functional.batch_norm(theirs, mean, var, **known, training=training)
            wanted = after(normal if residual is None else normal + torch.tensor(residual))
            with autograd.keep_inputs():          # SiLU beside a residual wants it
                found = layer(ours, residual)
            np.testing.assert_allclose(found.array, wanted.detach().numpy(), rtol=1e-9, atol=1e-9)
            (slope,) = autograd.grad((found * grad).sum(), [ours], create_graph=True)
            (steep,) = torch.autograd.grad((wanted * torch.tensor(grad)).sum(), [theirs], create_graph=True)
            np.testing.assert_allclose(slope.array, steep.detach().numpy(), rtol=1e-8, atol=1e-8)
            if training:
                (slope * slope).sum().backward()
                (steep * steep).sum().backward()
                np.testing.assert_allclose(ours.grad, theirs.grad.numpy(), rtol=1e-7, atol=1e-6)


def test_an_activation_that_is_not_known_is_named():
    with pytest.raises(ConfigError, match='unknown activation "relu7"'):
        nn.BatchNorm2d(3, activation="relu7")
    with pytest.raises(ArgumentError, match='activation is "tanh", expected relu, relu6, hardswish, silu or None'):
        ops.batch_norm(np.ones((2, 3, 4)), activation="tanh")


@pytest.mark.parametrize("alone", [True, False])
def test_running_statistics_on_a_device_are_the_hosts_and_travel_once(monkeypatch, alone):
    from fakegpu import DeviceArray, xp

    from mpitrain.backend import CPU, Device
    from mpitrain.nn.statistics import move_statistics, running_layers
    moved, (asarray, get) = [], (type(xp).asarray, DeviceArray.get)
    models = []
    for device in (CPU, Device("gpu", xp)):
        model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3))
        model.initialize(1, device=device)
        nn.defer_statistics(model)
        model.train()
        for seed in (1, 2):
            model(Tensor(device.put(np.random.default_rng(seed).standard_normal((4, 3, 5, 5)).astype(np.float32))))
        monkeypatch.setattr(type(xp), "asarray", staticmethod(lambda *a, **k: moved.append("up") or asarray(*a, **k)))
        monkeypatch.setattr(DeviceArray, "get", lambda self: moved.append("down") or get(self))
        if alone:
            move_statistics(running_layers(model))
        else:
            nn.apply_statistics(model, nn.collect_statistics(model))
        monkeypatch.undo()
        models.append(model)
    assert moved == ([] if alone else ["down", "up"])
    for (_, host), (_, there) in zip(models[0].named_buffers(), models[1].named_buffers(), strict=True):
        np.testing.assert_allclose(there.array.get(), host.array, rtol=1e-6, atol=1e-7)
