"""Who has which rows: every row once, by the seed alone, in the proportions that the rules promise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from mpitrain.data.keyed import key
from mpitrain.data.partitions import (
    NO_CLASS,
    ByColumn,
    Dirichlet,
    Iid,
    OfUser,
    Partition,
    Shards,
    Sizes,
    digest,
    rounded_shares,
    rows_of_workers,
    shuffled,
)
from mpitrain.errors import ConfigError

RULES: list[Callable[[], Partition]] = [Iid, lambda: Shards("1"), lambda: Shards("3"), lambda: Dirichlet("0.1"),
                                        lambda: Dirichlet("100"), lambda: Dirichlet("1e-9"), lambda: Sizes("0.5"),
                                        lambda: Sizes("20")]


def labels(n: int, classes: int = 10) -> NDArray[np.int64]:
    return np.random.default_rng(n).integers(0, classes, n)


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize(("n", "count"), [(1000, 7), (90, 30), (3, 1), (300, 1)])
def test_every_row_belongs_to_one_worker(make: Callable[[], Partition], n: int, count: int) -> None:
    rows = rows_of_workers(make(), labels(n), count, seed=3)
    assert len(rows) == count and all(len(own) for own in rows)
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(n))
    assert all((np.diff(own) > 0).all() for own in rows)


@pytest.mark.parametrize("make", RULES)
def test_a_workers_rows_are_a_function_of_the_seed_and_its_number(make: Callable[[], Partition]) -> None:
    y = labels(600)
    rows = rows_of_workers(make(), y, 20, seed=5)
    assert all(np.array_equal(make()(y, 20, worker, 5), own) for worker, own in enumerate(rows))
    assert digest(rows) != digest(rows_of_workers(make(), y, 20, seed=6))


def test_partitions_are_those_of_earlier_versions() -> None:
    """A run that goes on after an update of NumPy, or of this package, finds its workers' rows where they were."""
    y = np.arange(500, dtype=np.int64) % 10
    found = {name: digest(rows_of_workers(rule, y, 25, 0))[:12] for name, rule in
             (("iid", Iid()), ("shards", Shards("2")), ("dirichlet", Dirichlet("0.1")), ("sizes", Sizes("1.0")))}
    assert found == KNOWN


KNOWN = {"iid": "9f4c35d01a3c", "shards": "7993d9afef64", "dirichlet": "5c51d1fd707f", "sizes": "1ae8e4b884fe"}


def test_equal_parts_differ_by_a_row_at_most() -> None:
    for rule in (Iid(), Dirichlet("0.3")):
        sizes = [len(own) for own in rows_of_workers(rule, labels(1003), 100, 0)]
        assert set(sizes) == {10, 11}


def test_shards_give_a_worker_as_many_stretches_of_the_sorted_labels() -> None:
    y = np.repeat(np.arange(10), 100)
    rows = rows_of_workers(Shards("2"), y, 50, 1)
    assert all(len(np.unique(y[own])) <= 2 for own in rows) and {len(own) for own in rows} == {20}
    assert len({frozenset(y[own]) for own in rows}) > 10                       # they are dealt at random


def test_the_proportions_of_classes_are_dirichlets() -> None:
    """Chi-square of the marginals, which are Beta(a, (C - 1) a), over 20 intervals of equal probability: 43.8 in 0.1 % of all."""
    from scipy.stats import beta
    draws, alpha, classes, n = np.random.RandomState(1), 0.5, 4, 4000
    rule = Dirichlet(str(alpha))
    found = np.array([rule.proportions(draws, classes) for _ in range(n)])
    assert np.allclose(found.sum(axis=1), 1)
    for column in found.T:
        counts = np.histogram(beta.cdf(column, alpha, (classes - 1) * alpha), bins=20, range=(0, 1))[0]
        assert ((counts - n / 20) ** 2 / (n / 20)).sum() < 43.8


def test_workers_have_classes_in_those_proportions() -> None:
    """Counts of a class among those that draw first, while there are rows of all classes: beta-binomial, by chi-square over its
    deciles (27.9 in 0.1 % of all). With proportions of the data instead (iid) it is beyond all bounds."""
    from scipy.stats import betabinom
    classes, each, count, alpha = 5, 20, 3000, 0.4
    y = np.tile(np.arange(classes), count * each // classes)
    first = shuffled(count, key(9, "dirichlet turns"))[:1500]
    law = betabinom(each, alpha, (classes - 1) * alpha)
    bounds = np.unique(law.ppf(np.linspace(0, 1, 11)[1:-1]))
    expected = np.diff(np.concatenate([[0.0], law.cdf(bounds), [1.0]])) * len(first)

    def chi_square(rule: Partition) -> float:
        rows = rows_of_workers(rule, y, count, 9)
        found = np.array([(y[rows[worker]] == 2).sum() for worker in first])
        observed = np.histogram(found, bins=[-1, *(bounds + 0.5), each + 1])[0]
        return float(((observed - expected) ** 2 / expected).sum())
    assert chi_square(Dirichlet(str(alpha))) < 27.9 < 1000 < chi_square(Iid())


def test_sizes_are_log_normal() -> None:
    """The logarithms' mean and deviation, where rounding to rows tells little."""
    sizes = np.array([len(own) for own in rows_of_workers(Sizes("0.7"), labels(400_000), 800, 2)])
    spread = np.log(sizes).std()
    assert 0.63 < spread < 0.77 and abs(np.log(sizes).mean() - np.log(400_000 / 800) + 0.7 ** 2 / 2) < 0.1


def test_shares_are_rounded_to_their_sum_and_to_a_row_at_least() -> None:
    found = rounded_shares(np.array([1e9, 1.0, 1e-9, 3.0]), 10)
    assert found.sum() == 10 and found.tolist() == [7, 1, 1, 1]


def test_a_column_gives_a_worker_to_each_of_its_values() -> None:
    rule = ByColumn("writer")
    rule.values = np.array([7, 3, 7, 900, 3])
    assert [own.tolist() for own in rows_of_workers(rule, labels(5), 3, 0)] == [[1, 4], [0, 2], [3]]
    with pytest.raises(ConfigError, match=r"has 3 different values .* workers.count = 4; set it to 3"):
        rows_of_workers(rule, labels(5), 4, 0)


def test_a_users_own_function_is_asked_for_each_worker_and_proved() -> None:
    y = labels(12)

    def own(labels: NDArray[np.int64], count: int, worker: int, seed: int) -> NDArray[np.int64]:
        return np.arange(worker, len(labels), count)
    assert rows_of_workers(OfUser(own, "mine.py:own"), y, 4, 0)[1].tolist() == [1, 5, 9]
    for wrong, message in (
            (lambda labels, count, worker, seed: [0, worker + 1], r"gives worker 1 the row 0, which worker 0 has already"),
            (lambda labels, count, worker, seed: [worker, worker], r"gives worker 0 the row 0, which it has twice"),
            (lambda labels, count, worker, seed: [worker + 10], r"gives worker 2 the row 12; there are 12 training rows"),
            (lambda labels, count, worker, seed: [-1 - worker], r"gives worker 0 the row -1"),
            (lambda labels, count, worker, seed: [0.5], r"must give whole numbers, .* found float64"),
            (lambda labels, count, worker, seed: [worker], r"gives no worker the row 4, nor 7 others"),
            (lambda labels, count, worker, seed: [] if worker else np.arange(12), r"gives worker 1 no row"),
            (lambda labels, count, worker, seed: 1 // worker, r"the rows of worker 0, raised ZeroDivisionError")):
        with pytest.raises(ConfigError, match=message):
            rows_of_workers(OfUser(wrong, "mine.py:wrong"), y, 4, 0)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Dirichlet("0"), r'"dirichlet:0" needs the concentration .* above 0, found "0"'),
    (lambda: Dirichlet("nan"), r'"dirichlet:nan" needs'),
    (lambda: Dirichlet(""), r'"dirichlet:" needs'),
    (lambda: Sizes("-1"), r'"sizes:-1" needs'),
    (lambda: Shards("0"), r'"shards:0" cuts so many shards for each worker, a whole number of 1 or more'),
    (lambda: Shards("1.5"), r'"shards:1.5" cuts'),
    (lambda: Iid("3"), r'"iid:3" takes nothing behind the name'),
    (lambda: ByColumn(""), r"names no column")])
def test_an_argument_that_may_not_stand_there_is_refused(make: Callable[[], Partition], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_workers_without_rows_and_targets_without_classes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers.count = 11 is more than the 10 training rows"):
        rows_of_workers(Iid(), labels(10), 11, 0)
    with pytest.raises(ConfigError, match=r'"dirichlet:..." is of classes'):
        rows_of_workers(Dirichlet("0.1"), np.full(10, NO_CLASS), 2, 0)
    with pytest.raises(ConfigError, match=r"cuts 12 shards for 6 workers, and there are 10 training rows; set fewer shards, or workers.count to 5"):
        rows_of_workers(Shards("2"), labels(10), 6, 0)
