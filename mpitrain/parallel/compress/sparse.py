"""Compressors that send few elements: the largest, or ones that all workers draw alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.backend.random import stream_key
from mpitrain.errors import ConfigError
from mpitrain.kernels import compress as kernels
from mpitrain.kernels.random import random_words
from mpitrain.parallel.compress.compressor import Gathered, Host, Linear, Message, Piece, State, block_bounds, share, whole

BLOCK = 4096
LEAST = 32        # elements of a small block: LeNet on MNIST lost 0.85 points at 1 % with 1, 0.35 with 16, 0.15 with 32 (2026-11)


class TopK(Gathered):
    """``topk:0.01``: of each 4,096 elements of a parameter the 1 % largest in size (Stich et al. 2018, "Sparsified SGD with
    memory"), and of a smaller parameter's, or the rest of one, at least 32, if a whole block sends as many. Of equal ones the
    first travel. An element takes 4 bytes: its value as bfloat16, and its place in the block.

    A message: the values of all blocks, then their places as 16 bits. Elements that travel keep what rounding leaves, the others
    all.
    """

    exact, block = True, BLOCK

    def __init__(self, pieces: Sequence[Piece], n: int, *, seed: int = 0, feedback: bool = True, share: float = 0.01):
        super().__init__(pieces, n, seed=seed, feedback=feedback)
        self.bounds = block_bounds(self.pieces, BLOCK)
        few = min(LEAST, count_of(share, BLOCK))
        self.counts = np.array([max(count_of(share, size), min(few, size)) for size in np.diff(self.bounds)], np.int64)
        self.count = int(self.counts.sum())
        if n > 1 and self.nbytes() * n >= 8 * self.length > 0:
            self.notes.append(f"topk:{share:g} between {n} workers sends no less than dense gradients, as each message goes to "
                              f"all others; a share below {2 / n:.2g} does")

    @classmethod
    def options(cls, argument: str | None) -> dict[str, Any]:
        found = share(argument, "topk:0.01")
        if found * BLOCK < 1:
            raise ConfigError(f"{argument} of a block of {BLOCK} elements is less than one, and parameters would never send; "
                              f"take {1 / BLOCK:.6f} or more")
        return {"share": found}

    @classmethod
    def wider(cls, options: Mapping[str, Any], times: int) -> dict[str, Any]:
        return {"share": min(1.0, times * options["share"])}

    def nbytes(self) -> int:
        return whole(4 * self.count)

    def _parts(self, message: NDArray[np.uint8]) -> tuple[Any, Any]:
        return message[:2 * self.count].view(np.uint16), message[2 * self.count:4 * self.count].view(np.uint16)

    def encode(self, step: int, values: Host, state: State, message: Message) -> None:
        sent, places = self._parts(message)
        message[4 * self.count:] = 0
        kernels.version_of("topk_encode")(values, state.get("error"), self.bounds, self.counts, sent, places)

    def decode(self, step: int, messages: NDArray[np.uint8], values: Host) -> None:
        values[...] = 0
        for message in messages:
            kernels.version_of("topk_add")(*self._parts(message), self.bounds, self.counts, values)


def count_of(share: float, size: int) -> int:
    """How many a share of some elements is, rounded up, but for what rounding of the share adds."""
    return ceil(share * size - 1e-9)


class RandomK(Linear):
    """``randomk:0.1``: one of each 10 neighbours in a parameter, drawn alike by all workers from (seed, step, parameter's name).

    Each element travels with the same probability, 1 / 10, so that without feedback, where what travels is multiplied by 10, the
    sum is right on average (Stich et al. 2018). With feedback an element waits 10 steps on average, and then arrives as a sum:
    rate and momentum must shrink with the share, or training diverges.
    """

    exact = True

    def __init__(self, pieces: Sequence[Piece], n: int, *, seed: int = 0, feedback: bool = True, share: float = 0.1):
        self.block = round(1 / share)
        super().__init__(pieces, n, seed=seed, feedback=feedback)
        self.bounds = block_bounds(self.pieces, self.block)
        counts = [-(-(piece.stop - piece.start) // self.block) for piece in self.pieces]
        self.slots = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)       # of each piece in the message
        self.factors = np.diff(self.bounds).astype(np.float32)                       # neighbours are fewer at a parameter's end
        self._drawn: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))

    @classmethod
    def options(cls, argument: str | None) -> dict[str, Any]:
        found = share(argument, "randomk:0.1")
        if round(1 / found) < 2:
            raise ConfigError(f"one of each {1 / found:.3g} neighbours is nearly all of them; take 0.5 or less")
        return {"share": found}

    def words(self, phase: int) -> int:
        return len(self.factors)

    def drawn(self, step: int) -> NDArray[np.int64]:
        """Positions in the array of the elements that travel in a step."""
        if self._drawn[0] != step:
            words = [random_words(np.arange(count, dtype=np.uint64) + np.uint64(piece.first // (self.block or 1)),
                                  stream_key(self.seed, "random-k", step, piece.name), 1)[:, 0]
                     for piece, count in zip(self.pieces, np.diff(self.slots))]
            word = np.concatenate([np.zeros(0, np.uint32), *words]).astype(np.uint64)
            sizes = np.diff(self.bounds).astype(np.uint64)
            self._drawn = step, self.bounds[:-1] + (word * sizes >> np.uint64(32)).astype(np.int64)
        return self._drawn[1]

    def encode(self, phase: int, step: int, values: Host, state: State, message: Host) -> None:
        error, places = state.get("error"), self.drawn(step)
        with np.errstate(over="ignore", invalid="ignore"):
            a = values if error is None else values + error
            np.multiply(a[places], self.factors if error is None else np.float32(1), out=message)
        bad = [] if np.isfinite(a).all() else [i for i, p in enumerate(self.pieces) if not np.isfinite(a[p.start:p.stop]).all()]
        for i in bad:                             # what is not drawn would wait in the residual
            message[self.slots[i]] = np.nan
        if error is not None:
            a[places] = 0
            for piece in [self.pieces[i] for i in bad]:
                a[piece.start:piece.stop] = error[piece.start:piece.stop]
            error[...] = a

    def decode(self, phase: int, step: int, arrived: Host, state: State, values: Host) -> None:
        values[...] = 0
        values[self.drawn(step)] = arrived
