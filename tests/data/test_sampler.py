"""The order of samples: a permutation per epoch, known from (seed, step) alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.data import Sampler, split
from mpitrain.data.keyed import draw, key, mix, permute, sample_keys
from mpitrain.errors import ConfigError, DataError


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 3000), base=st.integers(0, 2**64 - 1))
def test_the_keyed_permutation_visits_every_row_once(n: int, base: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, base)), np.arange(n))


def test_the_keyed_permutation_of_a_huge_range_needs_no_table() -> None:
    n = 10**12 + 7
    found = permute(np.arange(5000), n, key(1))
    assert len(set(found.tolist())) == 5000 and found.min() >= 0 and found.max() < n
    assert found.max() > n * 0.99                     # spread over the range, not near its start


@pytest.mark.slow
def test_every_row_lands_everywhere_equally_often() -> None:
    n, runs = 12, 500
    counts = np.zeros((n, n))
    for seed in range(runs):
        counts[np.arange(n), permute(np.arange(n), n, key(seed, "order", 0))] += 1
    chi_square = ((counts - runs / n) ** 2 / (runs / n)).sum()
    assert chi_square < 190                           # 121 degrees of freedom: 1 in 20,000 at random; fixed seeds


def test_the_order_is_the_same_in_every_version() -> None:
    """A run resumed by a later version must see the rows it has not seen; change these numbers only with the format."""
    assert permute(np.arange(10), 10, key(7, "order", 2)).tolist() == PINNED_ORDER
    assert draw(sample_keys(key(7, "augment", 0), np.arange(6)), 1, 1000).tolist() == PINNED_DRAW


PINNED_ORDER = [8, 2, 5, 9, 6, 4, 1, 7, 3, 0]
PINNED_DRAW = [207, 347, 312, 256, 13, 364]


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 400), batch=st.integers(1, 60), seed=st.integers(0, 9), drop_last=st.booleans())
def test_an_epoch_holds_every_row_once_but_for_a_dropped_last_batch(n: int, batch: int, seed: int, drop_last: bool) -> None:
    batch = min(batch, n)
    sampler = Sampler(n, batch, seed=seed, drop_last=drop_last)
    for epoch in (0, 3):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        rows = [sampler.rows(step) for step in steps]
        assert [len(r) for r in rows] == [sampler.size(step) for step in steps]
        every = np.concatenate(rows)
        assert len(every) == len(set(every.tolist())) == (n // batch * batch if drop_last else n)
        assert set(every.tolist()) <= set(range(n))


def test_the_key_of_integers_is_the_array_hash() -> None:
    assert key(5, 9) == int(mix(mix(np.array([5], np.uint64)) ^ np.uint64(9))[0])


def test_any_step_is_known_without_those_before() -> None:
    one = Sampler(10_000, 96, seed=5)
    order = np.random.default_rng(0).permutation(300)[:40]
    straight = {step: one.rows(step) for step in range(300)}
    for step in order:
        assert np.array_equal(Sampler(10_000, 96, seed=5).rows(int(step)), straight[int(step)])
        assert np.array_equal(one.rows(int(step)), straight[int(step)])


def test_a_slice_of_the_global_batch_is_that_slice_across_blocks() -> None:
    sampler = Sampler(20_000, 5000, seed=1)
    whole = sampler.rows(2)
    assert np.array_equal(sampler.rows(2, 1700, 3100), whole[1700:3100])
    assert np.array_equal(whole, permute(np.arange(10_000, 15_000), 20_000, key(1, "order", 0)))


def test_epochs_and_seeds_differ_and_no_shuffle_keeps_the_order() -> None:
    sampler = Sampler(1000, 1000, seed=1)
    assert not np.array_equal(sampler.rows(0), sampler.rows(1))
    assert not np.array_equal(sampler.rows(0), Sampler(1000, 1000, seed=2).rows(0))
    assert Sampler(range(50, 60), 4, shuffle=False).rows(1).tolist() == [54, 55, 56, 57]


def test_rows_come_from_the_split() -> None:
    training, validation = split(100, 0.3, seed=4)
    assert set(Sampler(training, len(training)).rows(0).tolist()) == set(training.tolist())
    assert set(training.tolist()) | set(validation.tolist()) == set(range(100))


@pytest.mark.promise("C8")
def test_a_batch_larger_than_the_training_split_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"train.batch_size=64 is more than the 50 training rows.*data.drop_last=false"):
        Sampler(50, 64)
    assert len(Sampler(50, 64, drop_last=False).rows(0)) == 50
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        Sampler(50, 0)


@pytest.mark.promise("C8")
def test_no_training_rows_are_refused() -> None:
    with pytest.raises(DataError, match="no rows"):
        Sampler(0, 1)


def test_the_tail_split_takes_the_last_rows_by_exact_arithmetic() -> None:
    assert split(10_000, "tail:0.2") == (range(8000), range(8000, 10_000))
    training, validation = split(1_115_394, "tail:0.1")
    assert (len(training), len(validation)) == (1_003_854, 111_540)
    assert split(7, 0) == (range(7), range(7, 7))


def test_the_share_split_depends_on_the_seed_only_and_is_disjoint() -> None:
    training, validation = split(1797, 0.2, seed=3)
    assert (len(training), len(validation)) == (1437, 360)
    assert not set(training) & set(validation)
    assert np.array_equal(split(1797, 0.2, seed=3)[1], validation)
    assert not np.array_equal(split(1797, 0.2, seed=4)[1], validation)


@pytest.mark.parametrize(("value", "message"), [
    (1.5, "at least 0 and below 1"), ("tail:2", "at least 0 and below 1"), (float("nan"), "not a share"),
    ("tail:x", 'after "tail:" comes a share'), ("other.h5", "neither a share"), (0.999, "leaves 0 to train"),
    ("tail:1/0", "comes a share")])
def test_a_validation_that_makes_no_sense_is_refused(value: float | str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split(10, value)
