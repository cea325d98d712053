"""The keys of random numbers that a captured graph reads: small numbers that go up to the device before each launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpitrain.backend import Array, random
from mpitrain.errors import ConfigError

MOST = 1024                    # numbers of a launch, of 8 bytes


class Uncapturable(ConfigError):
    """Something in a step cannot be part of a graph."""


class Pinned:
    """Pinned memory of the host, from which up to MOST numbers at a time go up while the host goes on.

    A place is written again once its copy is over, which the host waits for where it is `PLACES` launches ahead of the device.
    """

    PLACES = 32

    def __init__(self, xp: Any):
        memory = xp.cuda.alloc_pinned_memory(self.PLACES * MOST * 8)
        self._places = np.frombuffer(memory, np.uint64, self.PLACES * MOST).reshape(self.PLACES, MOST)
        self._copied = [xp.cuda.Event(disable_timing=True) for _ in range(self.PLACES)]
        self._next = 0

    def send(self, numbers: list[int], target: Array) -> None:
        place = self._next % self.PLACES
        if self._next >= self.PLACES and not self._copied[place].done:
            self._copied[place].synchronize()
        values = self._places[place, :len(numbers)]
        values[...] = np.array(numbers, np.uint64)
        target[:len(numbers)].set(values)
        self._copied[place].record()
        self._next += 1


class StoredScope(random.Scope):
    """The scope of a capture, whose numbers change from launch to launch: kernels read them from memory of the device.

    `numbers` (MOST,) uint64 begins with the row of the first sample in the global batch; then comes a key for each use of a layer
    that draws, in the order of use. `fill` writes those of a step. `samples` are consecutive.
    """

    def __init__(self, numbers: Array, count: int, seed: int):
        super().__init__(seed)
        self.numbers, self.count = numbers, count
        self.places: dict[tuple[str, int], int] = {}  # of keys in `numbers`, by layer and use

    def copy(self) -> StoredScope:
        made = StoredScope(self.numbers, self.count, self.seed)
        made.places, made.uses, made.kept = self.places, dict(self.uses), self.kept
        return made

    def key(self, layer: str) -> Array:
        use = self.uses.get(layer, 0)
        self.uses[layer] = use + 1
        place = self.places.setdefault((layer, use), len(self.places) + 1)
        if place >= MOST:
            raise Uncapturable(f"layer {layer} is one of more than {MOST - 1} that draw random numbers")
        return self.numbers[place:place + 1]

    def rows(self, n: int, xp: Any) -> Array:
        found: Array | None = self.kept.get((n, xp))
        if found is None:
            each, rest = divmod(n, self.count)
            if rest:
                raise Uncapturable(f"random numbers for {n} rows are drawn in a batch of {self.count} samples")
            found = self.kept[n, xp] = xp.arange(n, dtype=xp.uint64) + self.numbers[:1] * xp.uint64(each)
        return found

    def fill(self, step: int, first: int, pinned: Pinned) -> None:
        """Brings up what a launch reads: at most 8 kB, of which a key has 8 bytes."""
        if self.places:
            pinned.send([first, *(random.stream_key(self.seed, step, layer, use) for layer, use in self.places)], self.numbers)
