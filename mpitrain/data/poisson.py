"""Batches in which each row is or is not, for itself: the only draw for which epsilons of sampled steps hold."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.keyed import key, sample_keys
from mpitrain.data.sampler import Index, Sampler
from mpitrain.errors import ConfigError

RARE = 34.0                    # a capacity is exceeded with a probability of at most exp(-RARE), 2e-15, below any delta


class PoissonSampler(Sampler):
    """A row is in the batch of a step if its key for that step is below `q`, by number: a function of (seed, step, row).

    An epoch is 1/q steps, in which a row is drawn once on average. A batch that has more than `capacity` rows, which does not
    happen, ends there.
    """

    def __init__(self, index: Index | int, q: float, *, seed: int = 0):
        if not 0.0 < q <= 1.0:
            raise ConfigError(f"a Poisson sampler draws each row with a probability above 0, at most 1, found {q:g}")
        n = index if isinstance(index, int) else len(index)
        super().__init__(index, max(1, round(q * n)), seed=seed)
        self.q, self.capacity = q, capacity(n, q)
        self.steps_per_epoch = max(1, round(1 / q))
        self._numbers = np.asarray(self.index, np.int64)
        self._drawn = lru_cache(4)(self._draw)                # Prefetching threads share one sampler.

    def size(self, step: int) -> int:
        return len(self._drawn(step))

    def rows(self, step: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        return self._drawn(step)[start:stop]

    def _draw(self, step: int) -> NDArray[np.int64]:
        below = np.uint64(min(int(self.q * 2.0 ** 64), (1 << 64) - 1))
        keys = sample_keys(key(self.seed, "poisson", step), self._numbers)
        drawn = self._numbers if self.q == 1 else self._numbers[keys < below]
        return drawn[:self.capacity]


def capacity(n: int, q: float) -> int:
    """Rows that a batch out of `n` will hardly ever exceed, by Bernstein's inequality for a binomial number."""
    mean = n * q
    more = RARE / 3 + np.sqrt(RARE * RARE / 9 + 2 * RARE * mean * (1 - q))
    return min(n, int(np.ceil(mean + more)))
