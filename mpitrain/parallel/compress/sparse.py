"""Compressors that send few elements: the largest, or ones that all workers draw alike."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.errors import ConfigError
from mpitrain.kernels import compress as kernels
from mpitrain.parallel.compress.compressor import Gathered, Host, Message, Piece, State, block_bounds, share, whole

BLOCK = 4096


class TopK(Gathered):
    """``topk:0.01``: of each 4,096 elements of a parameter the 1 % largest in size, at least one (Stich et al. 2018, "Sparsified
    SGD with memory"). Of equal ones the first travel. An element takes 6 bytes: its value, and its place in the block.

    A message: the values of all blocks, then their places as 16 bits. Elements that travel have no residual, the others all.
    """

    exact, block = True, BLOCK

    def __init__(self, pieces: Sequence[Piece], n: int, *, seed: int = 0, feedback: bool = True, share: float = 0.01):
        super().__init__(pieces, n, seed=seed, feedback=feedback)
        self.bounds = block_bounds(self.pieces, BLOCK)
        self.counts = np.array([max(1, ceil(share * size - 1e-9)) for size in np.diff(self.bounds)], np.int64)
        self.count = int(self.counts.sum())
        if n > 1 and self.nbytes() * n >= 8 * self.length > 0:
            self.notes.append(f"topk:{share:g} between {n} workers sends no less than dense gradients: each worker's message goes "
                              f"to all others; a share below {4 / (3 * n):.2g} does")

    @classmethod
    def options(cls, argument: str | None) -> dict[str, Any]:
        found = share(argument, "topk:0.01")
        if found * BLOCK < 1:
            raise ConfigError(f"{argument} of a block of {BLOCK} elements is less than one, and parameters would never send; "
                              f"take {1 / BLOCK:.6f} or more")
        return {"share": found}

    def nbytes(self) -> int:
        return whole(6 * self.count)

    def _parts(self, message: NDArray[np.uint8]) -> tuple[Any, Any]:
        return message[:4 * self.count].view(np.float32), message[4 * self.count:6 * self.count].view(np.uint16)

    def encode(self, step: int, values: Host, state: State, message: Message) -> None:
        sent, places = self._parts(message)
        message[6 * self.count:] = 0
        kernels.version_of("topk_encode")(values, state.get("error"), self.bounds, self.counts, sent, places)

    def decode(self, step: int, messages: NDArray[np.uint8], values: Host) -> None:
        values[...] = 0
        for message in messages:
            kernels.version_of("topk_add")(*self._parts(message), self.bounds, self.counts, values)
