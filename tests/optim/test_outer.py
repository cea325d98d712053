"""Outer rules beside the formulas of their papers in float64, and Nesterov's beside PyTorch's SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpitrain.config.levels import make_outer
from mpitrain.errors import ConfigError

ROUNDS, N = 6, 50


def by_rule(name: str, gradients: Any, lr: float, dtype: Any = np.float32, inner: Any = None, **arguments: Any) -> Any:
    rule = make_outer(name, lr, arguments)
    theta = np.ones(gradients.shape[1], dtype)
    state = [np.full(theta.shape, value, dtype) for value in rule.states.values()]
    for i, gradient in enumerate(gradients):
        rule.change(theta, gradient.astype(dtype), state, round=i + 1, inner_lr=0.1 if inner is None else inner[i])
    return theta


def formula(name: str, gradients: Any, lr: float, tau: float = 1e-3) -> Any:
    """Algorithm 2 of Reddi et al. 2021, written with the mean change D = -d as there."""
    x, m, v = np.ones(gradients.shape[1]), 0.0, tau ** 2
    beta1 = 0.0 if name == "fedadagrad" else 0.9
    for gradient in gradients:
        change = -gradient
        m = beta1 * m + (1 - beta1) * change
        v = {"fedadagrad": lambda v, s: v + s, "fedadam": lambda v, s: 0.99 * v + 0.01 * s,
             "fedyogi": lambda v, s: v - 0.01 * s * np.sign(v - s)}[name](v, change ** 2)
        x = x + lr * m / (np.sqrt(v) + tau)
    return x


@pytest.fixture
def gradients() -> Any:
    return np.random.default_rng(3).standard_normal((ROUNDS, N)) * np.array([1, 0.01, 3, 0.001, 1, 0.5])[:, None]


@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi"])
def test_adaptive_rules_are_the_papers(name: str, gradients: Any) -> None:
    np.testing.assert_allclose(by_rule(name, gradients, 0.03, np.float64), formula(name, gradients, 0.03), rtol=1e-12)
    np.testing.assert_allclose(by_rule(name, gradients, 0.03), formula(name, gradients, 0.03), rtol=1e-5)


def test_adam_and_yogi_differ_where_squares_fall(gradients: Any) -> None:
    assert np.abs(by_rule("fedadam", gradients, 0.03) - by_rule("fedyogi", gradients, 0.03)).max() > 1e-4


@pytest.mark.parametrize("name, nesterov", [("nesterov", True), ("fedavgm", False)])
def test_momentum_is_that_of_sgd(name: str, nesterov: bool, gradients: Any) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(N, dtype=torch.float64))
    sgd = torch.optim.SGD([weight], lr=0.7, momentum=0.6, nesterov=nesterov)
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient)
        sgd.step()
    found = by_rule(name, gradients, 0.7, np.float64, momentum=0.6)
    np.testing.assert_allclose(found, weight.detach().numpy(), rtol=1e-12)


def test_slow_momentum_is_of_changes_over_the_rate_of_their_round(gradients: Any) -> None:
    rates, u, x = [0.1, 0.05, 0.02, 0.02, 0.01, 0.0], 0.0, np.ones(N)
    for gradient, gamma in zip(gradients, rates):
        if gamma:
            u = 0.5 * u + gradient / gamma
            x = x - 1.0 * gamma * u
    np.testing.assert_allclose(by_rule("slowmo", gradients, 1.0, np.float64, rates, momentum=0.5), x, rtol=1e-12)


def test_the_average_takes_the_mean_of_the_workers() -> None:
    np.testing.assert_array_equal(by_rule("average", np.full((1, 3), 0.25), 1.0), np.full(3, 0.75, np.float32))


@pytest.mark.parametrize("name, arguments, said", [
    ("nesterof", {}, 'unknown outer rule "nesterof" (did you mean "nesterov"?)'),
    ("average", {"momentum": 0.9}, "has no sync.momentum"),
    ("nesterov", {"momentum": 1.0}, "momentum of [[sync]]"), ("fedadam", {"tau": 0.0}, "tau of [[sync]]"),
    ("fedadam", {"betas": [0.9]}, "betas of [[sync]]")])
def test_a_wrong_rule_or_key_is_named(name: str, arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_outer(name, 1.0, arguments)
    assert said in str(caught.value)
