"""Packed compressors: int8, int4 and fewer levels with a scale for each 256 elements, and 1 bit with two values for as many.

    int8, int4   scale = largest size / 127 (7), q = a / scale to the nearest whole number, ties to even; the residual is exact
    levels:11    the same with largest size / 5: 11 levels, 9 elements in 32 bits. levels:3 is ternary (Wen et al. 2017, TernGrad)
    1 bit        one of two values, each the mean of its elements: Lloyd's algorithm (1982) on the block, where 1-bit SGD has the
                 means of what is below and above 0 (Seide et al. 2014)
    signs        sign(a) mean(abs(a)), one value for 4,096: the nearest of all +-s (Karimireddy et al. 2019). For momenta, whose
                 sizes are alike. Of gradients, many of them 0, residuals outgrow what is sent: LeNet on MNIST diverged (2026-11).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from mpitrain.backend.random import stream_key
from mpitrain.errors import ConfigError
from mpitrain.kernels import compress as kernels
from mpitrain.kernels import digits
from mpitrain.kernels.random import random_words
from mpitrain.parallel.compress.compressor import Host, Message, Packed, Piece, whole

SCALE = 4                                         # bytes


class Blocks(Packed):
    """A message is the scales of all blocks, then the bits of each block, which begin at whole bytes."""

    name: ClassVar[str]
    bits: ClassVar[int]
    scales: ClassVar[int] = 1                     # of a block

    def nbytes(self, first: int, stop: int) -> int:
        return whole(SCALE * self.scales * (stop - first) + self._bytes(first, stop))

    def _bytes(self, first: int, stop: int) -> int:
        sizes = np.diff(self.bounds[first:stop + 1])
        return int(((sizes * self.bits + 7) // 8).sum())

    def _parts(self, message: Message, first: int, stop: int) -> tuple[Any, Any]:
        begin = SCALE * self.scales * (stop - first)
        end = begin + self._bytes(first, stop)
        return message[:begin].view(np.float32), message[begin:end]

    def encode(self, step: int, worker: int, values: Host, error: Host | None, first: int, stop: int, message: Message) -> None:
        scales, q = self._parts(message, first, stop)
        message[scales.nbytes + len(q):] = 0
        kernels.version_of(f"{self.name}_encode")(values, error, self.bounds[first:stop + 1], scales, q)

    def decode(self, message: Message, first: int, stop: int, total: Host, add: bool) -> None:
        scales, q = self._parts(message, first, stop)
        kernels.version_of(f"{self.name}_decode")(q, self.bounds[first:stop + 1], scales, total, int(add))


class Int8(Blocks):
    """``int8:stochastic`` rounds up or down by chance, so that sums are right on average without a residual (QSGD, Alistarh et
    al. 2017): random words are those of (seed, step, worker, parameter's name, element)."""

    name, bits, block = "int8", 8, 256

    def __init__(self, pieces: Sequence[Piece], n: int, *, seed: int = 0, feedback: bool = True, stochastic: bool = False):
        super().__init__(pieces, n, seed=seed, feedback=feedback)
        self.stochastic, self.exact = stochastic, not stochastic

    @classmethod
    def options(cls, argument: str | None) -> dict[str, Any]:
        if argument not in (None, "stochastic"):
            raise ConfigError(f"its one option is int8:stochastic, found :{argument}")
        return {"stochastic": argument is not None}

    def encode(self, step: int, worker: int, values: Host, error: Host | None, first: int, stop: int, message: Message) -> None:
        if not self.stochastic:
            super().encode(step, worker, values, error, first, stop, message)
            return
        scales, q = self._parts(message, first, stop)
        message[scales.nbytes + len(q):] = 0
        words = self._words(step, worker, first, stop)
        kernels.version_of("int8_draw")(values, error, self.bounds[first:stop + 1], words, scales, q)

    def _words(self, step: int, worker: int, first: int, stop: int) -> Any:
        """uint32, one for each element of these blocks: those of its block, a row, in its parameter."""
        found = [np.zeros(0, np.uint32)]
        bounds = self.bounds[first:stop + 1]
        for piece in self.pieces:
            starts = bounds[:-1][(piece.start <= bounds[:-1]) & (bounds[:-1] < piece.stop)]
            if len(starts):
                rows = ((starts - piece.start + piece.first) // self.block).astype(np.uint64)
                words = random_words(rows, stream_key(self.seed, "int8", step, worker, piece.name), self.block).reshape(-1)
                found.append(words[:min(piece.stop, int(bounds[-1])) - int(starts[0])])
        return np.concatenate(found)


class Int4(Blocks):
    name, bits, block, exact = "int4", 4, 256, True


class Levels(Blocks):
    """``levels:11``, and 3, 5, 7 or 9: for links on which 4 bits are too many, and 1 bit loses too much."""

    name, bits, block, exact = "digits", 4, 256, True

    def __init__(self, pieces: Sequence[Piece], n: int, *, seed: int = 0, feedback: bool = True, levels: int = 11):
        super().__init__(pieces, n, seed=seed, feedback=feedback)
        self.levels = levels

    @classmethod
    def options(cls, argument: str | None) -> dict[str, Any]:
        if argument not in [str(levels) for levels in digits.DIGITS]:
            raise ConfigError(f"expected one of {', '.join(map(str, digits.DIGITS))} levels, as in levels:11, found "
                              f"{argument or 'nothing'}")
        return {"levels": int(argument or 0)}

    def _bytes(self, first: int, stop: int) -> int:
        return 4 * int(digits.words_of(np.diff(self.bounds[first:stop + 1]), self.levels).sum())

    def encode(self, step: int, worker: int, values: Host, error: Host | None, first: int, stop: int, message: Message) -> None:
        scales, words = self._parts(message, first, stop)
        message[scales.nbytes + len(words):] = 0
        digits.version_of("digits_encode")(values, error, self.bounds[first:stop + 1], scales, words.view(np.uint32), self.levels)

    def decode(self, message: Message, first: int, stop: int, total: Host, add: bool) -> None:
        scales, words = self._parts(message, first, stop)
        bounds = self.bounds[first:stop + 1]
        digits.version_of("digits_decode")(words.view(np.uint32), bounds, scales, total, self.levels, int(add))


class TwoMeans(Blocks):
    name, bits, scales, block = "twomeans", 1, 2, 256


class OneBit(Blocks):
    name, bits, block = "onebit", 1, 4096
