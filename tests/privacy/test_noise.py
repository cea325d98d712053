"""Noise by the law that it promises, and what is clipped."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.privacy.accountant import RenyiAccountant, Spent
from mpitrain.privacy.mechanism import Mechanism
from mpitrain.privacy.noise import Noise, gaussian

ALONE = SimpleNamespace(rank=0, size=1)


def test_noise_is_normal() -> None:
    """Moments within 4 standard errors, and the largest gap to the normal distribution by Kolmogorov's law (p = 1e-4)."""
    n = 1 << 20
    x = gaussian(b"a key", "a purpose", n)
    for power, mean, spread in ((1, 0, 1), (2, 1, math.sqrt(2)), (3, 0, math.sqrt(15)), (4, 3, math.sqrt(96))):
        assert abs((x ** power).mean() - mean) < 4 * spread / math.sqrt(n), power
    x.sort()
    normal = np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x[::64]])
    assert np.abs(normal - np.arange(0, n, 64) / n).max() < 2.23 / math.sqrt(n)
    assert abs(np.corrcoef(x[:-1:2], x[1::2])[0, 1]) > 0.9    # sorted: so the next line can fail
    x = gaussian(b"a key", "a purpose", n)
    assert abs(np.corrcoef(x[:n // 2], x[n // 2:])[0, 1]) < 4 * math.sqrt(2 / n)


def test_noise_is_a_function_of_key_and_purpose() -> None:
    assert (gaussian(b"a", "b", 9) == gaussian(b"a", "b", 9)).all() and len(gaussian(b"a", "b", 9)) == 9
    for other in (gaussian(b"b", "b", 9), gaussian(b"a", "c", 9)):
        assert (gaussian(b"a", "b", 9) != other).all()


def test_nobody_draws_the_same_noise_twice() -> None:
    drawn = []
    for noise in (Noise(ALONE), Noise(ALONE)):
        for step in (0, 0):                                   # a step that is done again after a return to a checkpoint
            total = np.zeros(50, np.float32)
            noise.add(total, 1.0, step)
            drawn.append(total)
    assert len({total.tobytes() for total in drawn}) == 4


def test_seeded_noise_is_the_same_each_time_and_another_at_each_step() -> None:
    def of(seed: int, step: int) -> bytes:
        total = np.zeros(50)
        Noise(ALONE, seed).add(total, 1.0, step)
        return total.tobytes()
    assert of(1, 2) == of(1, 2) != of(1, 3) and of(1, 2) != of(2, 2)


FLOATS = st.floats(-2.0 ** 60, 2.0 ** 60, width=32, allow_subnormal=False)


@given(st.lists(FLOATS, min_size=1, max_size=300), st.floats(1e-3, 1e3))
def test_nothing_is_beyond_the_clip(values: list[float], clip: float) -> None:
    delta = np.array(values, np.float32)
    before, mechanism = delta.astype(np.float64), Mechanism(clip, 1.0, 0.1, 1.0, Noise(ALONE), None)
    mechanism.bound(delta)
    norm = math.sqrt(float((before ** 2).sum()))
    assert np.sqrt((delta.astype(np.float64) ** 2).sum()) <= clip * (1 + 1e-6)
    if norm <= clip:
        assert (delta == before.astype(np.float32)).all()
    else:
        assert np.allclose(delta, before * (clip / norm), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_comes_through(value: float) -> None:
    delta = np.array([1.0, value], np.float32)
    Mechanism(1.0, 1.0, 0.1, 1.0, Noise(ALONE), None).bound(delta)
    assert not np.isfinite(delta).all()


def test_the_sum_is_divided_by_the_expected_number_and_what_is_not_trained_gets_no_noise() -> None:
    spent = Spent(RenyiAccountant(), 1e-5)
    mechanism = Mechanism(0.5, 2.0, 0.1, 8.0, Noise(ALONE), spent)
    segments = [SimpleNamespace(start=0, stop=1000, parameter=SimpleNamespace(requires_grad=True)),
                SimpleNamespace(start=1000, stop=1100, parameter=SimpleNamespace(requires_grad=False))]
    mechanism.segments = segments
    found = np.stack([released(mechanism) for _ in range(20)])
    assert (found[:, 1000:] == 0).all() and spent.history == {(0.1, 2.0): 20}
    noise = found[:, :1000] - 3.0 / 8
    assert abs(noise.mean()) < 4 * 0.125 / math.sqrt(noise.size)
    assert abs(noise.var() / 0.125 ** 2 - 1) < 4 * math.sqrt(2 / noise.size)      # (2 * 0.5 / 8)^2


def released(mechanism: Mechanism) -> np.ndarray:
    total = np.full(1100, 3.0)
    mechanism.release(total, 0)
    return total
