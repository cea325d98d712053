"""Derivatives inside a user's model and loss: their gradients reach the buckets of data-parallel ranks as all others do."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from runs import steps, write
from standing import train

MINE = '''
import numpy as np

from mpitrain import Tensor, nn, ops
from mpitrain.autograd import enable_grad, grad


class Net(nn.Module):
    """(B, 2) points to (B, 2): u, and what is left of u_xx + u_yy."""

    def __init__(self, width):
        self.first, self.second = nn.Linear(2, width, activation="tanh"), nn.Linear(width, width, activation="gelu")
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        with enable_grad():                           # also where the run only evaluates
            x = Tensor(x.array, requires_grad=True)
            u = self.head(self.second(self.first(x)))
            by, = grad(u.sum(), x, create_graph=True)
            laplacian = sum(grad(by[:, i].sum(), x, create_graph=True)[0][:, i:i + 1] for i in range(2))
        return ops.concatenate([u, laplacian], 1)


def net(width):
    return Net(width)


class Residual(nn.Loss):
    """Squares, and a hundredth of the squared gradient of that by the output."""

    kind = "values"

    def __call__(self, output, target):
        squares = ops.mse(output, target)
        by, = grad(squares, output, create_graph=True)           # also where the run only evaluates: the output has a graph
        return squares + (by * by).sum() * 0.01
'''
CONFIG = '''
[model]
name = "mine.py:net"
width = 8
[data]
path = "points.h5"
x = "x"
y = "y"
validation = 0.1
[optimizer]
name = "adamw"
lr = 1e-2
[train]
loss = "mine.py:Residual"
steps = 8
batch_size = 16
micro_batches = 4
eval_every = 4
precision = "float64"
[log]
every = 1
progress_s = 0
'''


@pytest.fixture
def config(tmp_path: Path) -> Path:
    x = np.random.default_rng(1).uniform(0, 1, (200, 2))
    u = np.sin(np.pi * x).prod(axis=1)
    with h5py.File(tmp_path / "points.h5", "w") as file:
        file["x"], file["y"] = x, np.stack([u, -2 * np.pi ** 2 * u], axis=1)
    (tmp_path / "mine.py").write_text(MINE)
    return write(tmp_path, CONFIG)


def losses(n: int, config: Path, name: str, *words: str) -> list[float]:
    result = train(n, config, f"run.out={name}", *words)
    assert result.rc == 0 and result.error_lines == [], result.out + result.err
    return [line["loss"] for line in steps(config.parent / name)]


def test_two_ranks_train_a_physics_informed_network_as_one_does(config: Path) -> None:
    one, two = (losses(n, config, f"on{n}") for n in (1, 2))
    assert two == pytest.approx(one, rel=1e-12) and len(set(one)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("words", ["comm.sharding=parameters", "comm.sharding=gradients", "train.reproducible=layout"])
def test_slices_and_one_set_of_bits_go_with_derivatives_inside_a_model(config: Path, words: str) -> None:
    assert losses(2, config, "sliced", words) == pytest.approx(losses(2, config, "whole"), rel=1e-12)


@pytest.mark.slow
def test_a_recomputed_block_that_holds_derivatives_trains_to_the_same_bits(config: Path) -> None:
    """A block of a Sequential runs again in backward, and takes its derivatives again."""
    text = MINE.replace("    return Net(width)", '    return nn.Sequential(("net", Net(width)), ("last", nn.Linear(2, 2)))')
    (config.parent / "mine.py").write_text(text)
    assert losses(1, config, "again", "train.recompute=true") == losses(1, config, "kept")
