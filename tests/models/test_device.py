"""Describing, initialising, training and saving on a device: the same path as on the host, by a stand-in for a GPU."""

import copy

import numpy as np
import pytest
from fakegpu import DEVICES, DeviceArray, open_device, put, xp
from optimizer_state import set_state, state_of

from mpitrain import nn
from mpitrain.backend import CPU, Device, asnumpy, random
from mpitrain.models import MODELS
from mpitrain.optim import OPTIMIZERS, squared_norm

GPU = Device("gpu", xp)
CASES = {
    "mlp": ({"inputs": 6, "hidden": [5], "outputs": 3}, (4, 6)),
    "resnet20": ({"classes": 3, "channels": 1, "norm": "sync"}, (2, 1, 8, 8)),
    "resnet18": ({"classes": 3}, (4, 3, 48, 48)),
    "lenet": ({"size": 12, "classes": 3}, (2, 1, 12, 12)),
    "gpt": ({"layers": 1, "heads": 2, "width": 8, "block": 6, "vocabulary": 3, "dropout": 0.2}, (2, 6)),
    "gpt of experts": ({"layers": 1, "heads": 2, "width": 8, "block": 6, "vocabulary": 3, "experts": 3, "capacity": 0.8}, (2, 6)),
}


def train(model, storage, x, labels, optimizer):
    """Two steps; the optimizer's state and the model's."""
    for _ in range(2):
        loss = nn.LOSSES["cross_entropy"]()(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), **state_of(optimizer), "norm": np.array(squared_norm(storage.segments, storage.values))}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "resnet18")) for name in CASES])
def test_a_model_trains_on_a_device_as_on_the_host(name, device):
    module, move_there, kind = open_device(device)
    settings, shape = CASES[name]
    rng = np.random.default_rng(0)
    name = name.partition(" ")[0]
    x = rng.integers(0, 3, shape) if name == "gpt" else rng.standard_normal(shape)
    labels = x if name == "gpt" else np.arange(shape[0]) % 3
    states = []
    for where, move in ((Device("gpu", module), move_there), (CPU, lambda a: a)):
        model = MODELS[name](**settings)
        storage = model.initialize(seed=1, dtype="float64", device=where)
        with random.use(random.Scope(seed=3)):            # the same dropout masks
            states.append(train(model, storage, move(x), move(labels), OPTIMIZERS["sgd"](model, lr=0.001, momentum=0.9)))
    on_device, on_host = states
    assert isinstance(on_device[next(iter(on_host))], kind)
    for key, expected in on_host.items():
        np.testing.assert_allclose(asnumpy(on_device[key]), expected, rtol=1e-8, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("name", sorted({name for name in OPTIMIZERS if not OPTIMIZERS[name].sends} - {"lbfgs"}))
def test_every_optimizer_works_on_a_device_and_its_state_loads_from_the_host(name):
    model, twin = (MODELS["mlp"](6, [5], 3) for _ in range(2))
    for m in (model, twin):
        m.initialize(device=GPU)
    one, two = (OPTIMIZERS[name](m, lr=0.01) for m in (model, twin))
    gradients = put(np.ones(model.storage.size, np.float32))
    one.update(gradients, lr=0.01, step=1)
    twin.load_state_dict({key: asnumpy(value) for key, value in model.state_dict().items()})
    set_state(two, {key: asnumpy(value) for key, value in state_of(one).items()})
    for optimizer in (one, two):
        optimizer.update(gradients, lr=0.01, step=2, scale=0.5)
    for mine, expected in zip(twin.parameters(), model.parameters()):
        np.testing.assert_array_equal(asnumpy(mine.array), asnumpy(expected.array))


@pytest.mark.parametrize("layer", ["LSTM", "GRU"])
def test_recurrent_layers_run_on_a_device(layer):
    model = getattr(nn, layer)(3, 4, num_layers=2, dropout=0.5)
    model.initialize(device=GPU)
    y, _ = model(put(np.ones((2, 5, 3), np.float32)))
    y.backward(put(np.ones(y.shape, np.float32)))
    assert all(isinstance(p.grad, DeviceArray) for p in model.parameters())


def test_a_copied_model_stays_on_its_device():
    model = MODELS["mlp"](6, [5], 3)
    storage = model.initialize(device=GPU)
    assert isinstance(copy.deepcopy(model).storage.values, DeviceArray) and isinstance(storage.new_flat(), DeviceArray)
