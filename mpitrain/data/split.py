"""Which rows train and which validate."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from mpitrain.data.keyed import key, permute
from mpitrain.data.sampler import Index
from mpitrain.data.shards import Values
from mpitrain.errors import ConfigError

FOLDS = ("fold", "stratified")


def share_of(validation: float | str) -> tuple[Fraction, bool] | None:
    """(share, from the tail?) of a `data.validation` value, or None where it is a path.

    Exact decimal arithmetic: 0.1 of 1,115,394 rows is the same on every machine. Raises ConfigError for a share
    outside [0, 1).
    """
    tail = isinstance(validation, str) and validation.startswith("tail:")
    text = str(validation)[5:] if tail else str(validation)
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        if tail:
            raise ConfigError(f'data.validation="{validation}": after "tail:" comes a share such as 0.2') from None
        if isinstance(validation, str):
            return None
        raise ConfigError(f"data.validation={validation} is not a share between 0 and 1") from None
    if not 0 <= share < 1:
        raise ConfigError(f"data.validation={validation}: the share must be at least 0 and below 1")
    return share, tail


class Fold(NamedTuple):
    """One of `of` parts of the rows, the `number`-th from 1 on; `stratified`: of each class as many as of all."""

    number: int
    of: int
    stratified: bool


def fold_of(validation: float | str) -> Fold | None:
    """The fold that a `data.validation` value names, or None. ConfigError for one that is none."""
    kind, colon, text = str(validation).partition(":")
    if not colon or kind not in FOLDS or not isinstance(validation, str):
        return None
    number, slash, of = text.partition("/")
    if not (slash and all(part.isascii() and part.isdigit() and len(part) < 10 for part in (number, of))):
        raise ConfigError(f'data.validation="{validation}": after "{kind}:" comes a fold such as 2/5, the second of five')
    fold = Fold(int(number), int(of), kind == FOLDS[1])
    if not 1 <= fold.number <= fold.of or fold.of < 2:
        most = max(fold.of, 2)
        raise ConfigError(f'data.validation="{validation}": folds are 1/{most} to {most}/{most}, 2 of them at least')
    return fold


def is_file(validation: float | str) -> bool:
    """Whether a `data.validation` value is a path. ConfigError for a share or a fold that is none."""
    return isinstance(validation, str) and fold_of(validation) is None and share_of(validation) is None


def folds(n: int, of: int, *, seed: int = 0, labels: Values | None = None) -> list[Values]:
    """The rows of each of `of` folds, sorted: each row is in one of them, and their sizes differ by 1 at most.

    A permutation keyed by `seed` is cut; with `labels`, one for each row, it is dealt out class by class, so that each fold has
    of each class as many rows as another, or one more.
    """
    if n < of:
        raise ConfigError(f"{n} rows are too few for {of} folds; take {max(n, 2)} at most")
    order = permute(np.arange(n, dtype=np.int64), n, key(seed, "folds"))
    if labels is None:
        return [np.sort(order[n * i // of:n * (i + 1) // of]) for i in range(of)]
    dealt = order[np.argsort(labels[order], kind="stable")]
    return [np.sort(dealt[i::of]) for i in range(of)]


def split(n: int, validation: float | str, *, seed: int = 0,
          labels: Callable[[], Values] | None = None) -> tuple[Index, Index]:
    """The (training, validation) rows of a dataset of `n` rows.

    A share takes floor(n * (1 - share)) rows for training; which ones, a permutation keyed by `seed` says, and
    both sides are sorted. ``"tail:0.2"`` takes the last rows for validation instead. A path is not for this
    function: open that dataset by itself and train on all rows of the first. Of ``"fold:2/5"`` the second of five parts
    is for validation, of ``"stratified:2/5"`` with as many rows of each class, whose `labels()` are asked for.
    """
    if (fold := fold_of(validation)) is not None:
        if fold.stratified and labels is None:
            raise ConfigError(f'data.validation="{validation}": stratified folds are of labels, one for each row, and these data '
                              f'have none; take "fold:{fold.number}/{fold.of}"')
        parts = folds(n, fold.of, seed=seed, labels=labels() if fold.stratified and labels is not None else None)
        rest = [part for i, part in enumerate(parts, 1) if i != fold.number]
        return np.sort(np.concatenate(rest)), parts[fold.number - 1]
    found = share_of(validation)
    if found is None:
        raise ConfigError(f'data.validation="{validation}" is neither a share such as 0.2 nor "tail:0.2" nor "fold:1/5"')
    share, tail = found
    n_train = int(n * (1 - share))
    if share and n_train in (0, n):
        raise ConfigError(f"data.validation={validation} of {n} rows leaves {n_train} to train and {n - n_train} to validate; "
                          f"change the share")
    if tail or not share:
        return range(n_train), range(n_train, n)
    order = permute(np.arange(n, dtype=np.int64), n, key(seed, "split"))
    return np.sort(order[:n_train]), np.sort(order[n_train:])
