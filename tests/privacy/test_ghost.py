"""Norms and clipped sums of rows out of one backward, against the gradient of each row by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mpitrain import models, nn
from mpitrain.autograd import run_backward
from mpitrain.errors import GraphError
from mpitrain.privacy.ghost import scale_rows, squared_norms, suits

RNG = np.random.default_rng(0)
IMAGES, NUMBERS, WORDS = RNG.normal(size=(5, 3, 9, 9)), RNG.normal(size=(5, 6)), RNG.integers(0, 7, (5, 4))
LONG = RNG.normal(size=(5, 50, 3))


def mlp(activation: str | None, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 11, bias, activation=activation), nn.Linear(11, 9, bias, activation=activation),
                         nn.Linear(9, 4, bias))


def large() -> nn.Module:
    """Layers wide enough for the product that is computed in one call with its activation."""
    return nn.Sequential(nn.Flatten(), nn.Linear(243, 64, activation="relu"), nn.Linear(64, 64, activation="gelu"),
                         nn.Linear(64, 64), nn.Linear(64, 4))


def convolutions(groups: int = 1, bias: bool = True, **more: object) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3, bias=bias, **more), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Conv2d(6, 8, 2, groups=groups, bias=bias), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(8, 4))


CASES: dict[str, tuple[Callable[[], nn.Module], np.ndarray]] = {
    **{f"mlp {a}": ((lambda a=a: mlp(a)), NUMBERS) for a in (None, "relu", "gelu", "silu", "tanh", "sigmoid")},
    "without bias": (lambda: mlp("relu", False), NUMBERS), "large": (large, np.repeat(IMAGES, 20, 0)),
    "convolutions": (convolutions, IMAGES), "groups": (lambda: convolutions(2, padding=1, stride=2), IMAGES),
    "dilation": (lambda: convolutions(bias=False, dilation=2), IMAGES),
    "embedding": (lambda: nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(12, 4)), WORDS),
    "padding": (lambda: nn.Sequential(nn.Embedding(7, 3, padding_idx=2), nn.Flatten(), nn.Linear(12, 4)), WORDS),
    "positions": (lambda: nn.Sequential(nn.Linear(3, 2, activation="relu"), nn.Flatten(), nn.Linear(100, 4)), LONG),
    "pairs of positions": (lambda: nn.Sequential(nn.Embedding(7, 40), nn.Linear(40, 50), nn.Flatten(), nn.Linear(200, 4)), WORDS)}


def gradients(model: nn.Module, x: np.ndarray, y: np.ndarray, clip: float | None = None) -> tuple[list[np.ndarray], np.ndarray]:
    """Of the summed loss, each row's clipped where `clip` says to what; and the rows' norms by one backward."""
    for p in model.parameters():
        p.grad = None
    loss = nn.LOSSES["cross_entropy"]()(model(x), y)
    deferred = run_backward(loss, split=True)
    assert deferred is not None
    norms = np.sqrt(squared_norms(deferred.nodes, len(x)))
    if clip is not None:
        scale_rows(deferred.nodes, np.minimum(1, clip / norms))
    deferred.run()
    return [np.array(p.grad) for p in model.parameters()], norms


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_norms_and_the_clipped_sum_are_those_of_the_rows_one_by_one(name: str, precision: str) -> None:
    make, x = CASES[name]
    model = make()
    model.initialize(1, precision)
    assert suits(model)
    if x.dtype.kind == "f":
        x = x.astype(precision)
    y = np.arange(len(x)) % 4
    close = {"rtol": 1e-10, "atol": 1e-12} if precision == "float64" else {"rtol": 2e-5, "atol": 2e-6}
    each = []
    for i in range(len(x)):
        for p in model.parameters():
            p.grad = None
        run_backward(nn.LOSSES["cross_entropy"]()(model(x[i:i + 1]), y[i:i + 1]))
        each.append([np.array(p.grad, np.float64) for p in model.parameters()])
    wanted = np.sqrt([sum((g ** 2).sum() for g in row) for row in each])
    whole, norms = gradients(model, x, y)
    assert np.allclose(norms, wanted, rtol=close["rtol"])
    clip = float(np.median(wanted))
    clipped, _ = gradients(model, x, y, clip)
    for k, (plain, bounded) in enumerate(zip(whole, clipped)):
        assert np.allclose(plain, sum(row[k] for row in each), **close)
        assert np.allclose(bounded, sum(row[k] * min(1, clip / n) for row, n in zip(each, wanted)), **close)


class Twice(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(6, 6)

    def forward(self, x: object) -> object:
        return self.layer(self.layer(x))


def in_two_places() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(nn.Sequential(layer, nn.ReLU()), layer)


def one_weight() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, second)


@pytest.mark.parametrize("model", [
    Twice(), in_two_places(), one_weight(), models.gpt(1, 2, 8, 4, 5), nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)),
    nn.Sequential(nn.Linear(6, 4), nn.Softmax(0)),
    nn.Sequential(nn.Flatten(start=0), nn.Linear(30, 4)), nn.Sequential(nn.Linear(6, 4), nn.PReLU()),
    nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))])
def test_models_of_which_it_does_not_follow_have_their_rows_one_by_one(model: nn.Module) -> None:
    assert not suits(model)


def test_a_parameter_that_is_used_twice_is_found_all_the_same() -> None:
    model = Twice()
    model.initialize(0)
    with pytest.raises(GraphError, match="the parameter .* is used twice, so that norms of rows do not follow"):
        gradients(model, NUMBERS.astype(np.float32), np.zeros(5, np.int64))


def test_our_plain_models_suit() -> None:
    assert suits(models.lenet()) and suits(models.mlp(64, [16], 10))
