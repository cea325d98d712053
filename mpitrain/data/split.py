"""Which rows train and which validate."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from mpitrain.data.keyed import key, permute
from mpitrain.data.sampler import Index
from mpitrain.errors import ConfigError


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


def split(n: int, validation: float | str, *, seed: int = 0) -> tuple[Index, Index]:
    """The (training, validation) rows of a dataset of `n` rows.

    A share takes floor(n * (1 - share)) rows for training; which ones, a permutation keyed by `seed` says, and
    both sides are sorted. ``"tail:0.2"`` takes the last rows for validation instead. A path is not for this
    function: open that dataset by itself and train on all rows of the first.
    """
    found = share_of(validation)
    if found is None:
        raise ConfigError(f'data.validation="{validation}" is neither a share such as 0.2 nor "tail:0.2"')
    share, tail = found
    n_train = int(n * (1 - share))
    if share and n_train in (0, n):
        raise ConfigError(f"data.validation={validation} of {n} rows leaves {n_train} to train and {n - n_train} to validate; "
                          f"change the share")
    if tail or not share:
        return range(n_train), range(n_train, n)
    order = permute(np.arange(n, dtype=np.int64), n, key(seed, "split"))
    return np.sort(order[:n_train]), np.sort(order[n_train:])
