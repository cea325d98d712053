"""Epsilon against quadrature, the study's figures and, where it is installed, dp-accounting."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpitrain.config.topology import ACCOUNTANTS
from mpitrain.errors import ConfigError
from mpitrain.privacy.accountant import ORDERS, RenyiAccountant, Spent, epsilon_of, noise_for
from mpitrain.privacy.renyi import alternating_weights, erfcx, renyi_divergence

ROWS = [(0.008, 1.1, 1250, 1e-5, 1.510308), (0.01, 1.0, 1000, 1e-5, 2.101365), (0.004, 1.3, 15000, 1e-5, 1.918232),
        (1.0, 4.0, 10, 1e-5, 3.617100), (0.1, 1.0, 100, 1e-4, 6.821629), (0.1, 2.0, 300, 1e-3, 3.340120),
        (256 / 60000, 1.1, 14062, 1e-5, 2.596556), (0.5, 0.7, 20, 1e-5, 28.997640)]


def quadrature(q: float, sigma: float, order: float) -> float:
    """The divergence by the trapezoidal rule on the whole line, in 80 bits: for such integrands its error falls exponentially."""
    wide = np.longdouble
    z, step = np.linspace(wide(-13 * sigma), wide(order + 13 * sigma + 1), 20_001, retstep=True)
    density = np.exp(-z * z / wide(2 * sigma * sigma)) / (wide(sigma) * np.sqrt(2 * np.arccos(wide(-1))))
    mixed = np.log1p(wide(q) * np.expm1((2 * z - 1) / wide(2 * sigma * sigma)))
    return float(np.log1p((np.expm1(wide(order) * mixed) * density).sum() * step) / (wide(order) - 1))


@pytest.mark.parametrize("q, sigma", [(q, sigma) for q, sigma, *_ in ROWS if q < 1] + [
    (0.9, 0.7), (0.999, 3.0), (1e-4, 20.0), (0.3, 0.5), (1e-6, 0.6), (0.5, 5.0)])
def test_every_order_agrees_with_quadrature(q: float, sigma: float) -> None:
    for order in (1.05, 1.1, 1.3, 1.5, 1.8, 1.9, 2, 2.5, 3, 3.7, 5.2, 7.7, 10.9, 16, 33.3):
        assert renyi_divergence(q, sigma, order) == pytest.approx(quadrature(q, sigma, order), rel=1e-9, abs=1e-11), order


def test_the_order_that_dp_accounting_gets_wrong() -> None:
    assert renyi_divergence(0.5, 0.7, 1.8) == pytest.approx(0.807607347, abs=1e-9)      # 0.811425 there


@pytest.mark.parametrize("q, sigma, steps, delta, epsilon", ROWS)
def test_epsilon_is_that_of_the_study(q: float, sigma: float, steps: int, delta: float, epsilon: float) -> None:
    assert RenyiAccountant().epsilon({(q, sigma): steps}, delta) == pytest.approx(epsilon, abs=2e-6)


@pytest.mark.parametrize("q, sigma, steps, delta", [row[:4] for row in ROWS[:7]])
def test_epsilon_is_that_of_dp_accounting(q: float, sigma: float, steps: int, delta: float) -> None:
    rdp = pytest.importorskip("dp_accounting.rdp", reason="dp-accounting is not installed")
    import dp_accounting
    theirs = rdp.RdpAccountant(list(ORDERS))
    theirs.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps)
    assert RenyiAccountant().epsilon({(q, sigma): steps}, delta) == pytest.approx(theirs.get_epsilon(delta), abs=1e-3)


@pytest.mark.parametrize("q, sigma, steps, delta", [row[:4] for row in ROWS])
def test_epsilon_is_not_below_that_of_loss_distributions(q: float, sigma: float, steps: int, delta: float) -> None:
    dp_accounting = pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    theirs = dp_accounting.pld.PLDAccountant()
    theirs.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps)
    assert theirs.get_epsilon(delta) <= RenyiAccountant().epsilon({(q, sigma): steps}, delta)


def test_what_it_claims_is_not_below_what_is_true_of_one_gaussian_step() -> None:
    """The exact curve of the Gaussian mechanism without sampling (Balle, Wang, 2018)."""
    def delta_of(sigma: float, epsilon: float) -> float:
        def phi(x: float) -> float:
            return math.erfc(-x / math.sqrt(2)) / 2
        return phi(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * phi(-0.5 / sigma - epsilon * sigma)
    for sigma in (0.7, 1.0, 2.0, 4.0):
        epsilon = RenyiAccountant().epsilon({(1.0, sigma): 1}, 1e-5)
        assert 1e-8 < delta_of(sigma, epsilon) <= 1e-5


def test_no_noise_costs_everything_and_no_sampling_nothing() -> None:
    accountant = RenyiAccountant()
    assert accountant.epsilon({(0.1, 0.0): 1}, 1e-5) == math.inf
    assert accountant.epsilon({(0.0, 1.0): 9}, 1e-5) == accountant.epsilon({}, 1e-5) == 0.0
    assert accountant.epsilon({(0.1, 1.0): 1}, 0.0) == math.inf
    assert epsilon_of((2.0,), (1e-12,), 1e-5) == 0.0          # total variation below delta


def test_the_helpers_of_the_series() -> None:
    assert erfcx(6.5) == pytest.approx(math.exp(6.5 ** 2) * math.erfc(6.5), rel=1e-14)     # where one way gives over to the other
    for x in (0.0, 0.5, 3.0, 6.49, 6.51, 20.0, 1e4):          # erfcx(x) = 2/sqrt(pi) times the integral of exp(-2 x t - t^2)
        t = np.linspace(0, 40 / (1 + 2 * x), 40_001)
        assert erfcx(x) == pytest.approx(2 / math.sqrt(math.pi) * np.trapezoid(np.exp(-2 * x * t - t * t), t), rel=1e-6)
    total = sum((-1) ** k * w / (k + 1) for k, w in enumerate(alternating_weights(28)))
    assert total == pytest.approx(math.log(2), abs=4e-16)     # 1 - 1/2 + 1/3 - ...: a million terms give six digits


def test_noise_is_found_for_an_epsilon() -> None:
    accountant = RenyiAccountant()
    for epsilon, q, steps in ((3.0, 0.1, 150), (0.5, 0.01, 1000), (50.0, 0.5, 10)):
        sigma = noise_for(accountant, epsilon, 1e-5, q, steps)
        assert accountant.epsilon({(q, sigma): steps}, 1e-5) <= epsilon < accountant.epsilon({(q, sigma * 0.999): steps}, 1e-5)


def test_an_epsilon_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy.epsilon = 0.0001 cannot be had: at delta 1e-05, 1000000 steps .* even with"):
        noise_for(RenyiAccountant(), 1e-4, 1e-5, 1.0, 10**6)


def test_what_is_spent_only_grows() -> None:
    spent = Spent(ACCOUNTANTS["rdp"](), 1e-5)
    before = spent.epsilon()
    for _ in range(3):
        spent.add(0.1, 1.0)
        assert (now := spent.epsilon()) > before
        before = now
    kept = spent.record()
    spent.add(0.1, 1.0, 2)
    spent.restore(kept)                                       # a checkpoint of before: its steps are seen all the same
    assert spent.history == {(0.1, 1.0): 5}
    spent.restore([[0.1, 1.0, 7], [0.2, 1.0, 1]])
    assert spent.history == {(0.1, 1.0): 7, (0.2, 1.0): 1}


@pytest.mark.parametrize("record", [[[0.1, 1.0]], [[2.0, 1.0, 1]], [[0.1, 1.0, -1]], [[0.1, 1.0, 0.5]], [["a", 1.0, 1]], 3])
def test_a_damaged_record_is_no_record(record: object) -> None:
    spent = Spent(RenyiAccountant(), 1e-5)
    with pytest.raises((ValueError, TypeError)):
        spent.restore(record)                                 # type: ignore[arg-type]
    assert spent.history == {}
