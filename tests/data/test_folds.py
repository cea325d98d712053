"""Folds: each row validates once, and what a fold is depends on the seed alone."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.data import fold_of, folds, is_file, split
from mpitrain.errors import ConfigError


@pytest.mark.parametrize("n, k", [(10, 5), (101, 5), (7, 7), (569, 3)])
def test_folds_are_disjoint_and_cover_all_rows(n: int, k: int) -> None:
    parts = folds(n, k, seed=3)
    assert sorted(np.concatenate(parts)) == list(range(n)) and max(map(len, parts)) - min(map(len, parts)) <= 1
    for i in range(k):
        training, validation = split(n, f"fold:{i + 1}/{k}", seed=3)
        assert list(validation) == list(parts[i]) and sorted([*training, *validation]) == list(range(n))


def test_the_seed_alone_says_what_a_fold_is() -> None:
    a, b, c = (split(100, "fold:2/5", seed=seed)[1] for seed in (0, 0, 1))
    assert list(a) == list(b) != list(c)


def test_stratified_folds_have_each_class_alike() -> None:
    labels = np.repeat([0, 1, 2], [61, 33, 7])
    parts = folds(101, 5, seed=1, labels=labels)
    assert sorted(np.concatenate(parts)) == list(range(101)) and {len(part) for part in parts} == {20, 21}
    counts = np.array([np.bincount(labels[part], minlength=3) for part in parts])
    assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()
    assert list(split(101, "stratified:4/5", seed=1, labels=lambda: labels)[1]) == list(parts[3])


@pytest.mark.parametrize("text", ["fold:", "fold:2", "fold:0/5", "fold:6/5", "fold:1/1", "fold:-1/5", "stratified:a/b",
                                  "fold:1/5/2"])
def test_what_is_no_fold_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        fold_of(text)


def test_a_path_is_no_fold() -> None:
    assert is_file("other.h5") and is_file("folds/a.h5")
    assert not any(map(is_file, ("fold:1/5", "stratified:1/5", "tail:0.2", 0.2)))
    with pytest.raises(ConfigError, match="too few for 5 folds"):
        split(3, "fold:1/5")
    with pytest.raises(ConfigError, match="stratified folds are of labels"):
        split(30, "stratified:1/5")
