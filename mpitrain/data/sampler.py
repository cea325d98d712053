"""Which rows make up the global batch of a step: a function of (seed, step), so one integer resumes a run."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mpitrain.data.keyed import key, permute
from mpitrain.errors import ConfigError, DataError

Index = range | NDArray[np.int64]      # A split's rows: a range costs nothing, an array can pick any.

BLOCK = 4096      # Positions are permuted in blocks: 0.2-0.6 us a row; batches of 128 took 2.5 us (on a busy 2-core machine).


class Sampler:
    """The rows of the global batch at every step, in an order that depends on (seed, epoch) alone.

    `index` holds the dataset's rows to draw from. Each epoch visits every one of them once, except that the last
    partial batch is dropped (`drop_last`) or kept short. Nothing here knows the number of ranks.
    """

    def __init__(self, index: Index | int, batch: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = True):
        self.index: Index = range(index) if isinstance(index, int) else index
        self.n, self.batch, self.seed, self.shuffle, self.drop_last = len(self.index), batch, seed, shuffle, drop_last
        if self.n == 0:
            raise DataError("the training split has no rows; lower data.validation or give more data")
        if batch < 1:
            raise ConfigError(f"train.batch_size must be at least 1, not {batch}")
        if drop_last and batch > self.n:
            raise ConfigError(f"train.batch_size={batch} is more than the {self.n} training rows, so every batch would be "
                              f"dropped; lower it to {self.n} or set data.drop_last=false")
        self.steps_per_epoch = self.n // batch if drop_last else -(-self.n // batch)
        self._block = lru_cache(4 + batch // BLOCK)(self._permuted)      # Prefetching threads share one sampler.

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def size(self, step: int) -> int:
        """The number of rows of the global batch at `step`: `batch`, or less at the end of an epoch."""
        return min(self.batch, self.n - (step % self.steps_per_epoch) * self.batch)

    def rows(self, step: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Rows `start`..`stop` of the global batch at `step` (all of it unless told), as rows of the dataset."""
        size = self.size(step)
        stop = size if stop is None else min(stop, size)
        first = (step % self.steps_per_epoch) * self.batch
        positions = self._positions(self.epoch(step), first + start, first + stop)
        if isinstance(self.index, range):
            return self.index.start + self.index.step * positions
        return self.index[positions]

    def _positions(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        if not self.shuffle or start >= stop:
            return np.arange(start, max(start, stop), dtype=np.int64)
        parts = [self._block(epoch, b)[max(start - b * BLOCK, 0):stop - b * BLOCK]
                 for b in range(start // BLOCK, -(-stop // BLOCK))]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _permuted(self, epoch: int, block: int) -> NDArray[np.int64]:
        positions = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.n), dtype=np.int64)
        return permute(positions, self.n, key(self.seed, "order", epoch))
