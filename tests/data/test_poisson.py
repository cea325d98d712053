"""Rows that are drawn each for itself: their law, and that nobody else's part changes a row's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpitrain.data.poisson import PoissonSampler, capacity
from mpitrain.errors import ConfigError


def test_each_row_is_in_with_probability_q_whatever_the_others_do() -> None:
    n, q, steps = 500, 0.1, 2000
    sampler = PoissonSampler(n, q, seed=3)
    drawn = np.zeros((steps, n))
    for step in range(steps):
        drawn[step, sampler.rows(step)] = 1
    assert abs(drawn.mean() - q) < 4 * math.sqrt(q * (1 - q) / drawn.size)
    assert np.abs(drawn.mean(0) - q).max() < 5 * math.sqrt(q * (1 - q) / steps)
    sizes = drawn.sum(1)                                      # binomial: with a fixed number drawn its variance would be 0
    assert abs(sizes.var() / (n * q * (1 - q)) - 1) < 4 * math.sqrt(2 / steps)
    together = np.corrcoef(drawn[:, :50].T)                   # of two rows, and of a row in two steps
    assert np.abs(together[~np.eye(50, dtype=bool)]).max() < 5 / math.sqrt(steps)
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 4 / math.sqrt(drawn.size)


def test_a_row_is_a_function_of_seed_step_and_its_number() -> None:
    all_rows, some = PoissonSampler(1000, 0.2, seed=1), PoissonSampler(np.arange(100, 300), 0.2, seed=1)
    for step in (0, 7):
        whole = all_rows.rows(step)
        assert (some.rows(step) == whole[(whole >= 100) & (whole < 300)]).all()
        assert (np.concatenate([all_rows.rows(step, 0, 50), all_rows.rows(step, 50)]) == whole).all()
        assert all_rows.size(step) == len(whole)
    assert (all_rows.rows(0)[:100] != all_rows.rows(1)[:100]).any()
    assert (PoissonSampler(1000, 0.2, seed=2).rows(0)[:100] != all_rows.rows(0)[:100]).any()


def test_epochs_and_capacities() -> None:
    sampler = PoissonSampler(1000, 0.05)
    assert sampler.steps_per_epoch == 20 and sampler.epoch(45) == 2 and sampler.batch == 50
    assert (PoissonSampler(10, 1.0).rows(3) == np.arange(10)).all()
    assert capacity(10, 1.0) == capacity(10, 0.5) == 10
    for n, q in ((10_000, 0.01), (1000, 0.5), (100_000, 0.001)):
        most = capacity(n, q)
        assert n * q < most < n * q + 12 * math.sqrt(n * q) + 30
        tail = sum(math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(q)
                            + (n - k) * math.log1p(-q)) for k in range(most + 1, min(n, most + 300) + 1))
        assert tail < 2e-15


@pytest.mark.parametrize("q", [0.0, -0.1, 1.5, math.nan])
def test_a_probability_that_is_none_is_refused(q: float) -> None:
    with pytest.raises(ConfigError, match="draws each row with a probability above 0, at most 1, found"):
        PoissonSampler(10, q)
