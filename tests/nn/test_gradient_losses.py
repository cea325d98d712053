"""Losses that hold derivatives, trained: physics-informed networks and a Wasserstein critic with a gradient penalty.

From one start each loss curve is that of the same program in PyTorch, in float64, to 1e-9.
"""

import numpy as np
import pytest

from mpitrain import Tensor, autograd, nn, ops, optim

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

WIDTH, STEPS = 16, 25


def ours(sizes, activation, seed):
    layers = [(f"l{i}", nn.Linear(a, b, activation=activation if i + 2 < len(sizes) else None))
              for i, (a, b) in enumerate(zip(sizes, sizes[1:]))]
    model = nn.Sequential(*layers)
    model.initialize(seed=seed, dtype="float64")
    return model


def twin(model, activation):
    """The same network in PyTorch, from the same start."""
    layers = []
    weights = [torch.tensor(p.array) for p in model.parameters()]
    for w, b in zip(weights[::2], weights[1::2]):
        linear = torch.nn.Linear(w.shape[1], w.shape[0], dtype=torch.float64)
        linear.weight.data, linear.bias.data = w.clone(), b.clone()
        layers += [linear, activation()]
    return torch.nn.Sequential(*layers[:-1])


class Ours:
    """One program for both: what differs between the two libraries."""

    grad, Adam, cat = staticmethod(autograd.grad), staticmethod(optim.Adam), staticmethod(ops.concatenate)

    @staticmethod
    def leaf(x):
        return Tensor(x, requires_grad=True)

    @staticmethod
    def parameters(model):
        return model


class Theirs:
    grad, cat = staticmethod(torch.autograd.grad), staticmethod(torch.cat)

    @staticmethod
    def leaf(x):
        return torch.tensor(x, requires_grad=True)

    @staticmethod
    def parameters(model):
        return model.parameters()

    Adam = staticmethod(torch.optim.Adam)


def slopes(lib, u, inputs):
    """The derivatives of u (n, 1) by each column of its inputs (n, d), as columns with a graph."""
    by, = lib.grad(u.sum(), inputs, create_graph=True)
    return [by[:, i:i + 1] for i in range(by.shape[1])]


def burgers(lib, model, rng):
    """u_t + u u_x = (0.01 / pi) u_xx, u(x, 0) = -sin(pi x): Raissi, Perdikaris, Karniadakis, 2019."""
    inside = lib.leaf(rng.uniform((-1, 0), (1, 1), (40, 2)))
    x0 = rng.uniform(-1, 1, (20, 1))
    u = model(inside)
    u_x, u_t = slopes(lib, u, inside)
    u_xx, _ = slopes(lib, u_x, inside)
    residual = u_t + u * u_x - u_xx * (0.01 / np.pi)
    start = model(lib.leaf(np.hstack([x0, 0 * x0]))) + lib.leaf(np.sin(np.pi * x0))
    return (residual * residual).mean() + (start * start).mean()


def poisson(lib, model, rng):
    """u_xx + u_yy = -2 pi^2 sin(pi x) sin(pi y) on the unit square, 0 on its edges."""
    points = rng.uniform(0, 1, (40, 2))
    inside = lib.leaf(points)
    u_x, u_y = slopes(lib, model(inside), inside)
    laplacian = slopes(lib, u_x, inside)[0] + slopes(lib, u_y, inside)[1]
    residual = laplacian + lib.leaf(2 * np.pi ** 2 * np.sin(np.pi * points).prod(axis=1, keepdims=True))
    edge = rng.uniform(0, 1, (20, 2))
    edge[np.arange(20), np.arange(20) % 2] = np.arange(20) // 2 % 2
    rim = model(lib.leaf(edge))
    return (residual * residual).mean() + (rim * rim).mean() * 10


def curve(lib, model, loss):
    rng, optimizer = np.random.default_rng(5), lib.Adam(lib.parameters(model), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        value = loss(lib, model, rng)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return np.array(losses)


@pytest.mark.parametrize("loss", [pytest.param(burgers, marks=pytest.mark.slow), poisson])
def test_a_physics_informed_network_trains_as_in_pytorch(loss):
    model = ours([2, WIDTH, WIDTH, 1], "tanh", 1)
    there = curve(Theirs, twin(model, torch.nn.Tanh), loss)
    here = curve(Ours, model, loss)
    assert np.abs(here / there - 1).max() < 1e-9 and here[-3:].mean() < 0.7 * here[0]


def wasserstein(lib, critic, generator):
    """A step of the critic and one of the generator, many times: Gulrajani and others, 2017."""
    rng = np.random.default_rng(6)
    optimizers = [lib.Adam(lib.parameters(model), lr=3e-3) for model in (critic, generator)]
    losses = []
    for _ in range(STEPS):
        real = rng.normal(size=(30, 2)) @ np.array([[1.0, 0.5], [0.0, 0.3]]) + 1
        fake = generator(lib.leaf(rng.normal(size=(30, 3)))).detach()
        share = rng.uniform(size=(30, 1))
        between = lib.leaf(share * real + (1 - share) * np.asarray(fake))
        by, = lib.grad(critic(between).sum(), between, create_graph=True)
        penalty = (((by * by).sum(1) ** 0.5 - 1) ** 2.0).mean()
        value = critic(fake).mean() - critic(lib.leaf(real)).mean() + penalty * 10
        for optimizer, loss in zip(optimizers, (value, None)):
            for each in optimizers:
                each.zero_grad()
            if loss is None:
                loss = critic(generator(lib.leaf(rng.normal(size=(30, 3))))).mean() * -1
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return np.array(losses)


@pytest.mark.parametrize(("activation", "theirs"), [
    ("silu", torch.nn.SiLU), *(pytest.param(name, kind, marks=pytest.mark.slow)
                               for name, kind in (("gelu", torch.nn.GELU), ("relu", torch.nn.ReLU)))])
def test_a_critic_with_a_gradient_penalty_trains_as_in_pytorch(activation, theirs):
    critic, generator = ours([2, WIDTH, WIDTH, 1], activation, 2), ours([3, WIDTH, 2], "relu", 3)
    there = wasserstein(Theirs, twin(critic, theirs), twin(generator, torch.nn.ReLU))
    here = wasserstein(Ours, critic, generator)
    assert np.abs(here - there).max() < 1e-9 * np.abs(there).max() and abs(here[-2]) < abs(here[0])
