"""Packed compressors: int8 and int4 with a scale for each 256 elements, and 1 bit with two values for as many.

    int8, int4   scale = largest size / 127 (7), q = a / scale to the nearest whole number, ties to even; the residual is exact
    1 bit        one of two values, each the mean of its elements: Lloyd's algorithm (1982) on the block, where 1-bit SGD has the
                 means of what is below and above 0 (Seide et al. 2014)
    signs        sign(a) mean(abs(a)), one value for 4,096: the nearest of all +-s (Karimireddy et al. 2019). For momenta, whose
                 sizes are alike. Of gradients, many of them 0, residuals outgrow what is sent: LeNet on MNIST diverged (2026-11).
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from mpitrain.kernels import compress as kernels
from mpitrain.parallel.compress.compressor import Host, Message, Packed, whole

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
        message[SCALE * len(scales) + len(q):] = 0
        kernels.version_of(f"{self.name}_encode")(values, error, self.bounds[first:stop + 1], scales, q)

    def decode(self, message: Message, first: int, stop: int, total: Host, add: bool) -> None:
        scales, q = self._parts(message, first, stop)
        kernels.version_of(f"{self.name}_decode")(q, self.bounds[first:stop + 1], scales, total, int(add))


class Int8(Blocks):
    name, bits, block, exact = "int8", 8, 256, True


class Int4(Blocks):
    name, bits, block, exact = "int4", 4, 256, True


class TwoMeans(Blocks):
    name, bits, scales, block = "twomeans", 1, 2, 256


class OneBit(Blocks):
    name, bits, block = "onebit", 1, 4096
